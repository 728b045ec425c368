"""What is explored: requests, pools, transport, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions

BLOCK = 2  # tokens
ALL_FAULTS = frozenset(
    {
        "lose", "duplicate", "corrupt", "crash_source", "crash_sink", "cancel", "source_deadline", "sink_deadline",
        "lease", "suspect_source", "suspect_sink", "push_fails", "all_finished", "forget", "reconnect",
    }
)  # fmt: skip


class ViolationError(AssertionError):
    """A promise was broken."""


def hashes_of(request_id: str, num_blocks: int) -> list[bytes]:
    """Of a request's blocks: no two requests have one in common, the attempts of one have."""
    return [f"{request_id} {index}".encode().ljust(16, b".") for index in range(num_blocks)]


@dataclass(frozen=True)
class Setting:
    """Sizes are in blocks; a prompt has `granted[r] + hits[r]` of them, and one more if it pulls them."""

    name: str = ""
    granted: tuple[int, ...] = (1, 1)
    pulls: tuple[int, ...] = ()  # requests that the sink computes, and pulls of the source what that has of them
    hits: tuple[int, ...] = (0, 0)  # of each prompt's own prefix, cached on the sink
    source_blocks: int = 4
    max_parked: int = 4
    sink_blocks: int = 4
    one_sided: bool = True  # shm: the source stores; False, tcp: the sink receives, close_grant ends all writes
    is_revocable: bool = False  # one-sided, and yet a fence ends while the source lives: it takes old grants away
    max_faults: int = 1
    faults: frozenset[str] = ALL_FAULTS
    submitted: bool = False  # start with every request known to both nodes

    def universe(self) -> Any:
        from tests.worlds.world import Universe

        return Universe(self)

    @property
    def fences_living(self) -> bool:
        return self.is_revocable or not self.one_sided

    @property
    def num_requests(self) -> int:
        return len(self.granted)

    def num_blocks(self, name: str) -> int:
        return self.source_blocks if name == "p" else self.sink_blocks

    def num_prompt_tokens(self, r: int) -> int:
        """So many that its first token's KV has room in its last block; what is pulled ends below the last token."""
        return BLOCK * (self.granted[r] + self.hits[r]) + (1 if r in self.pulls else -1)

    def options(self, name: str) -> NodeOptions:
        share = self.max_parked / self.source_blocks
        return NodeOptions(
            "prefill" if name == "p" else "decode",
            ModelOptions("m"),
            CacheOptions(block_size=BLOCK, hash_block_size=BLOCK),
            SchedulerOptions(parked_kv_fraction=share, growth_headroom=0.0),
        )
