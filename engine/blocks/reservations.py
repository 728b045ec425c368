"""Who holds blocks without running, and who gives them back first when somebody lacks room. Pure; docs/blocks.md.

A sequence that runs owns its blocks until it ends or its scheduler preempts it. Everybody else who takes blocks of the
pool registers a `Hold`. Whoever lacks blocks asks here and nowhere else, as the `Kind` that he is, and the holds of the
kinds before his own are asked to give back, in one order. That no dead end is left is explored
(tests/unit/engine/blocks/test_reservations.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Kind(enum.IntEnum):
    """Each gives way to those after it. START, CLAIM and RUN hold nothing here: they only ask."""

    LOAD = enum.auto()  # comes, or came, from a lower tier for a request that has not started, which can compute it
    PULL = enum.auto()  # the same from a peer, which has worked for it
    START = enum.auto()  # a request that lacks blocks to start
    HITS = enum.auto()  # of a ticket without a grant, which finds again what is still cached when it gets one
    CLAIM = enum.auto()  # the first claim in line
    OFFER = enum.auto()  # what a peer is told that it may pull; it ends by itself, and soon
    RUN = enum.auto()  # a sequence that lacks its next block, before another one is preempted
    # These end elsewhere and give way to nobody: nothing that is parked may keep out who has claimed.
    PARKED = enum.auto()  # a prompt that is computed, or being computed, without a grant
    CLAIMED = enum.auto()  # room for a prompt that has claimed at its sink, or was asked for and waits to claim


COULD_DO_WITHOUT = (Kind.LOAD, Kind.PULL, Kind.OFFER)
SHARE = 0.5  # of the pool, for all of these together; a guess


@dataclass(eq=False, slots=True)
class Hold:
    """`num_blocks`: that it has or will have at most. `give_back` frees at once what nobody reads or writes, and ends
    the hold when nothing is left of it; asked again, it does nothing."""

    kind: Kind
    num_blocks: int
    give_back: Callable[[], None]
    owner: object


class _Blocks(Protocol):
    """What is asked of the pool."""

    @property
    def num_free(self) -> int: ...

    def num_unused(self, block_ids: Sequence[int]) -> int: ...


class Reservations:
    """The holds of one pool."""

    def __init__(self, pool: _Blocks, num_blocks: int) -> None:
        self._pool, self._num_blocks = pool, num_blocks
        self._holds: dict[Kind, dict[Hold, None]] = {kind: {} for kind in Kind}
        self.is_asking = False  # what is given back belongs to who asked: nobody else may take it meanwhile

    def add(self, kind: Kind, num_blocks: int, give_back: Callable[[], None], owner: object) -> Hold:
        """`owner` never asks this hold: it is what he waits with."""
        hold = Hold(kind, num_blocks, give_back, owner)
        self._holds[kind][hold] = None
        return hold

    def end(self, hold: Hold | None) -> None:
        """Idempotent."""
        if hold is not None:
            self._holds[hold.kind].pop(hold, None)

    @property
    def is_empty(self) -> bool:
        return not any(self._holds.values())

    def make_room(self, num: int, kind: Kind, owner: object = None, hits: Sequence[int] = ()) -> bool:
        """Whether `num` blocks besides the cached `hits` are free, if need be after others gave back, the lowest kind
        first, the newest hold first. False: not yet, or they have to come from those who run."""
        if self._has(num, hits) or self.is_asking:
            return self._has(num, hits)
        self.is_asking = True
        try:
            for hold in [hold for lower in Kind if lower < kind for hold in reversed(self._holds[lower])]:
                if hold.owner is not owner and not self._has(num, hits):
                    hold.give_back()
        finally:
            self.is_asking = False
        return self._has(num, hits)

    def _has(self, num: int, hits: Sequence[int]) -> bool:
        return num <= self._pool.num_free - self._pool.num_unused(hits)

    def num_spare(self, owner: object = None) -> int:
        """Blocks that those who could do without may still take, so that they leave room for work; `owner` lets what
        was held for him go."""
        holds = [hold for kind in COULD_DO_WITHOUT for hold in self._holds[kind] if hold.owner is not owner]
        return int(SHARE * self._num_blocks) - sum(hold.num_blocks for hold in holds)

    def may_wait_with(self, num: int) -> bool:
        """Whether `num` more may be held for a request: within the share, or alone."""
        return num <= self.num_spare() or not self._num_held(*COULD_DO_WITHOUT)

    def may_claim(self, num: int) -> bool:
        """Whether a prompt of `num` blocks may claim room at its sink: if it fits beside what is parked here. A claim
        that got the sink's blocks before those of parked prompts would else make each pool wait for the other."""
        return self._num_held(Kind.PARKED) + num <= self._num_blocks

    def may_park(self, claimed: Hold, most: int) -> bool:
        """Whether a prompt that has claimed may start without a grant, within `most` blocks for all that do: beside it,
        and all that is parked, each other one that has claimed must fit, since their grants may come first."""
        others = [hold.num_blocks for hold in self._holds[Kind.CLAIMED] if hold is not claimed]
        room = min(most, self._num_blocks - max(others, default=0))
        return self._num_held(Kind.PARKED) + claimed.num_blocks <= room

    def _num_held(self, *kinds: Kind) -> int:
        return sum(hold.num_blocks for kind in kinds for hold in self._holds[kind])
