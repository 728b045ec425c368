"""What is explored: requests, pools, transport, bounds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions

BLOCK = 2  # tokens
TRANSPORT_FAULTS = frozenset({"lose", "duplicate", "corrupt", "push_fails"})
ALL_FAULTS = TRANSPORT_FAULTS | {
    "crash_source", "crash_sink", "cancel", "source_deadline", "sink_deadline", "lease", "suspect_source",
    "suspect_sink", "all_finished", "forget", "reconnect",
}  # fmt: skip
MOVE_FAULTS = TRANSPORT_FAULTS | {
    "crash", "suspect_sink", "suspect_source", "source_deadline", "sink_deadline", "give_up", "client_gone", "preempt",
}  # fmt: skip


class ViolationError(AssertionError):
    """A promise was broken."""


def hashes_of(request_id: str, num_blocks: int) -> list[bytes]:
    """Of a request's blocks: no two requests have one in common, the attempts of one have."""
    return [f"{request_id} {index}".encode().ljust(16, b".") for index in range(num_blocks)]


@dataclass(frozen=True)
class Bounds:
    name: str = ""
    one_sided: bool = True  # shm: the source stores; False, tcp: the sink receives, close_grant ends all writes
    is_revocable: bool = False  # one-sided, and yet a fence ends while the source lives: it takes old grants away
    max_faults: int = 1
    faults: frozenset[str] = ALL_FAULTS
    # Bytes move at once, nothing is sent again before something has gone wrong, twins go in order.
    is_calm: bool = False
    window: int = 0  # tokens that every layer sees; 0: all
    num_windows: int = 0  # window blocks of a block: then other layers see everything
    is_pipelined: bool = False  # a sequence's tokens are in flight for a while before the host knows them

    @property
    def fences_living(self) -> bool:
        return self.is_revocable or not self.one_sided


@dataclass(frozen=True)
class Setting(Bounds):
    """Prompts from "p" to "d", or both ways between "a" and "b", which do all work. Sizes are in blocks; a prompt has
    `granted[r] + hits[r]` of them, and one more if it pulls them."""

    granted: tuple[int, ...] = (1, 1)
    pulls: tuple[int, ...] = ()  # requests that the sink computes, and pulls of the source what that has of them
    hits: tuple[int, ...] = (0, 0)  # of each prompt's own prefix, cached on the sink
    source_blocks: int = 4
    max_parked: int = 4
    sink_blocks: int = 4
    priorities: tuple[int, ...] = (0, 0)  # of requests; lower goes first
    submitted: bool = False  # start with every request known to both nodes
    ways: tuple[str, ...] = ()  # of each request, "ab" or "ba"; none: all from "p" to "d"

    def universe(self) -> Any:
        from tests.worlds.prompts import PromptUniverse

        return PromptUniverse(self)

    @property
    def num_requests(self) -> int:
        return len(self.granted)

    @property
    def names(self) -> tuple[str, str]:
        return ("a", "b") if self.ways else ("p", "d")

    def way(self, r: int) -> str:
        """Names of its source and its sink."""
        return self.ways[r] if self.ways else "pd"

    def grants(self, name: str) -> bool:
        """Whether others may be granted blocks there."""
        return name != "p"

    def num_blocks(self, name: str) -> int:
        return self.source_blocks if name in "pa" else self.sink_blocks

    def num_prompt_tokens(self, r: int) -> int:
        """So many that its first token's KV has room in its last block; what is pulled ends below the last token."""
        return BLOCK * (self.granted[r] + self.hits[r]) + (1 if r in self.pulls else -1)

    def kind(self, r: int) -> tuple:
        """Equal for requests that can't be told apart before they are begun."""
        return self.way(r), self.granted[r], self.hits[r], self.priorities[r], r in self.pulls

    @property
    def is_mirrored(self) -> bool:
        """Whether it stays the same if both nodes change their names."""
        kinds = Counter(map(self.kind, range(self.num_requests)))
        mirrored = Counter({(way[::-1], *rest): number for (way, *rest), number in kinds.items()})
        return bool(self.ways) and kinds == mirrored and self.source_blocks == self.sink_blocks

    def options(self, name: str) -> NodeOptions:
        role = {"p": "prefill", "d": "decode"}.get(name, "unified")
        return _options(role, self.max_parked / self.source_blocks)


@dataclass(frozen=True)
class MoveSetting(Bounds):
    """Sequences that run on unified nodes. `moves`: (request, sample, from, to) that the router may ask for, each
    once. `starts`: where requests run; each has streamed its first token."""

    faults: frozenset[str] = MOVE_FAULTS
    moves: tuple[tuple[int, int, str, str], ...] = ((0, 0, "a", "b"),)
    starts: tuple[str, ...] = ("a",)
    names: tuple[str, ...] = ("a", "b")
    num_samples: int = 1
    num_prompt_tokens: int = 1  # of 2 * BLOCK a part is pushed while the sequence runs
    max_outputs: int = 2  # tokens of each sample, the one that starts the exploration included
    holds_tokens: bool = False  # none is made while a move of its request is under way: fewer states

    def universe(self) -> Any:
        from tests.worlds.moves import MoveUniverse

        return MoveUniverse(self)

    def grants(self, name: str) -> bool:
        return True

    def num_blocks(self, name: str) -> int:
        """So many that no sequence waits for blocks that a transfer reads, or that nobody may use any more."""
        return 16

    def options(self, name: str) -> NodeOptions:
        return _options("unified", 0.5)


def _options(role: Any, parked_share: float) -> NodeOptions:
    return NodeOptions(
        role,
        ModelOptions("m"),
        CacheOptions(block_size=BLOCK, hash_block_size=BLOCK),
        SchedulerOptions(parked_kv_fraction=parked_share, growth_headroom=0.0),
    )
