"""What nodes did for a prompt, as parts of the stages of its trace. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.router.requests.request_log import Stage


def node_parts(told: Mapping[str, Any], started_at: float) -> Iterator[Stage]:
    """The parts of a prompt that came at `started_at` (monotonic seconds), from its story as `RequestDesk.told` has it.
    What took no time that anybody measured begins and ends in one moment."""
    moments = [each for each in told["moments"] if each["where"] != "router" and each["kind"] != "tokens"]
    for moment in moments:
        begin = started_at + moment["at_s"]
        about: dict[str, str | int] = {"tandem.node": moment["where"]}
        if moment["kind"] == "chunk":
            about["tandem.tokens"] = moment["tokens"]
            yield Stage("prefill chunk", begin, begin + moment["lasts_s"], about)
        elif moment["kind"] == "push":
            about |= {"tandem.bytes": moment["bytes"], "tandem.layers": moment["layers"]}
            yield Stage("push KV", begin, begin + moment["lasts_s"], about)
        elif moment["kind"] == "verify":
            yield Stage("verify KV", begin, begin + moment["lasts_s"], about)
        else:
            yield Stage(moment["text"], begin, begin, about)


def stage_of(part: Stage, stages: Sequence[Stage]) -> int:
    """The index of the stage, of one prompt, in which a part begins."""
    begun = [index for index, stage in enumerate(stages) if stage.begin <= part.begin]
    return begun[-1] if begun else 0
