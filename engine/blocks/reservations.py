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
    """What blocks are held for. Each kind gives way to those after it. START, CLAIM and RUN only ask."""

    LOAD = enum.auto()  # KV from a lower tier for a request that has not started and could compute it instead
    PULL = enum.auto()  # the same from a peer, which has worked for it
    START = enum.auto()  # a request that lacks blocks to start
    HITS = enum.auto()  # cached blocks of a ticket without a grant, which looks them up again when it gets one
    CLAIM = enum.auto()  # the first claim in line, or a prompt that its sink has granted
    OFFER = enum.auto()  # blocks that a peer was told it may pull; the offer ends by itself, and soon
    RUN = enum.auto()  # a sequence that lacks its next block, before another one is preempted
    # These end elsewhere and give way to nobody: nothing that is parked may keep out who has claimed.
    PARKED = enum.auto()  # a prompt that is computed, or being computed, without a grant
    CLAIMED = enum.auto()  # room for a prompt that has claimed at its sink, or was asked for and waits to claim


COULD_DO_WITHOUT = (Kind.LOAD, Kind.PULL, Kind.OFFER)
SHARE = 0.5  # of the pool, for all holds of these kinds together; a guess


@dataclass(eq=False, slots=True)
class Hold:
    """Blocks that are held without running. `num_blocks` is the most that the hold has or will have. `give_back` frees
    at once what nobody reads or writes, and ends the hold when nothing is left of it; called again, it does nothing."""

    kind: Kind
    num_blocks: int
    give_back: Callable[[], None]
    owner: object


class _Blocks(Protocol):
    """The part of BlockPool that reservations use."""

    @property
    def num_free(self) -> int: ...

    def num_unused(self, block_ids: Sequence[int]) -> int: ...


class Reservations:
    """The holds of one pool."""

    def __init__(self, pool: _Blocks, num_blocks: int) -> None:
        self._pool, self._num_blocks = pool, num_blocks
        self._holds: dict[Kind, dict[Hold, None]] = {kind: {} for kind in Kind}
        self.is_asking = False  # while True, blocks that are given back belong to whoever asked, and to nobody else

    def add(self, kind: Kind, num_blocks: int, give_back: Callable[[], None], owner: object) -> Hold:
        """Registers a hold. Requests for room by its own `owner` never reach it: the owner waits with these blocks."""
        hold = Hold(kind, num_blocks, give_back, owner)
        self._holds[kind][hold] = None
        return hold

    def end(self, hold: Hold | None) -> None:
        """Ends a hold; does nothing for None and for one that has ended."""
        if hold is not None:
            self._holds[hold.kind].pop(hold, None)

    @property
    def is_empty(self) -> bool:
        return not any(self._holds.values())

    def make_room(self, num: int, kind: Kind, owner: object = None, hits: Sequence[int] = ()) -> bool:
        """Makes `num` blocks free besides the cached `hits`, if need be by asking others to give back: the lowest kind
        first, and of one kind the newest hold. False: not yet, or they have to come from running sequences."""
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
        """How many blocks holds of the kinds COULD_DO_WITHOUT may still take, so that room is left for work. What is
        held for `owner` counts as given back."""
        holds = [hold for kind in COULD_DO_WITHOUT for hold in self._holds[kind] if hold.owner is not owner]
        return int(SHARE * self._num_blocks) - sum(hold.num_blocks for hold in holds)

    def may_wait_with(self, num: int) -> bool:
        """Whether `num` more blocks may be held for a request: within SHARE, or when nothing else is held."""
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
