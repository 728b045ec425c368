"""The stages that a prompt went through, by the times at which its router saw them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tandem.router.requests.generation import Generation
from tandem.router.requests.request_log import Stage


def stages_of(generation: Generation, now: float) -> Iterator[Stage]:
    """What came of a prompt until `now`, one stage after the other. What never began is left out.

    Nodes are not asked: a stage ends when what it made comes to the router. So `transfer` lasts from the prefill node's
    first token to the decode node's own first, a step of decoding included.
    """
    index: dict[str, str | int] = {"tandem.prompt": generation.prompt_index}
    begin, placed = generation.started_at, generation.placement
    if placed is None or generation.placed_at is None:
        yield Stage("queue", begin, now, index)
        return
    yield Stage("queue", begin, generation.placed_at, {**index, "tandem.placement": placed.reason})
    computes = placed.prefill or placed.primary
    machine = generation.machine
    first_at, decoding_at = generation.first_token_at, machine.streams_since
    yield Stage(
        "prefill", generation.placed_at, first_at or now,
        {**index, "tandem.node": computes.node_id, "gen_ai.usage.input_tokens": generation.plan.num_prompt_tokens,
         "gen_ai.usage.cache_read.input_tokens": machine.num_cached_tokens},
    )  # fmt: skip
    if first_at is None:
        return
    decodes = {**index, "tandem.node": placed.primary.node_id}
    last_at = max(max(generation.last_token_at), first_at)
    if placed.prefill is not None and last_at > first_at:  # else the prefill node has made all there is
        arrived_at = first_at if decoding_at is None else max(first_at, decoding_at)
        yield Stage("transfer", first_at, arrived_at, {**decodes, "tandem.source": computes.node_id})
        first_at = arrived_at
    num_tokens = sum(sample.num_tokens for sample in generation.samples)
    if num_tokens > 1:
        yield Stage("decode", first_at, last_at, {**decodes, "gen_ai.usage.output_tokens": num_tokens})
