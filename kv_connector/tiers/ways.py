"""Copies down what somebody is about to push out of the pool by taking many blocks at once, before he does. Pure.

docs/tiers.md#way-is-made-first tells why.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from tandem.engine.blocks.pool import BlockPool
from tandem.kv_connector.tiers.index import TierIndex

# How long somebody waits for that. A host's link brings the blocks of 100,000 tokens down in 0.26 s.
WAY_S = 0.3  # a guess; docs/simulator.md#what-prompts-push-out says what saving them gives
WAY_SAVES = 4  # under way at a time, so that the link has work while the loop launches a step; a guess


@dataclass(eq=False, slots=True)
class Way:
    """The blocks that one taker would push out: what is still to be saved, in that order, and what the host has of them
    and keeps until they are taken."""

    asked_at: float
    deadline: float
    is_first: bool  # of its taker
    unsaved: deque[bytes] = field(default_factory=deque)
    wanted: set[bytes] = field(default_factory=set)  # all that was to be saved
    refused: set[bytes] = field(default_factory=set)  # for which the host has no room
    kept: set[bytes] = field(default_factory=set)
    is_over: bool = False


class Ways:
    """The ways that are being made. A taker's ends when all is saved, at its deadline, or with the taker."""

    def __init__(
        self, pool: BlockPool, host: TierIndex, lacks: Callable[[bytes], bool], clock: Callable[[], float]
    ) -> None:
        """`lacks`: whether a block of the pool is to be saved, and is not on its way. `clock`: monotonic seconds."""
        self._pool, self._host, self._lacks, self._clock = pool, host, lacks, clock
        self._ways: dict[Hashable, Way] = {}
        self._ended: list[Way] = []  # whose blocks are kept until the next turn

    # --- who takes ------------------------------------------------------------------------------------------

    def is_made(self, taker: Hashable, num_blocks: int, hashes: Sequence[bytes], hits: Sequence[int]) -> bool:
        """Whether the pool's next `num_blocks` blocks may be taken, but for `hits`, which are the first of `hashes`.
        False: ask again. It looks through the pool when it is asked first, and when what it found then is saved. Who
        has not asked for long, since he lacked something else, has his time once more."""
        now, way = self._clock(), self._ways.get(taker)
        if way is None or (way.is_first and now > way.asked_at + WAY_S):
            self.ended(taker)
            way = self._ways[taker] = Way(now, now + WAY_S, is_first=way is None)
        way.asked_at = now
        if way.is_over:
            return True
        self._drop_done(way)
        if not way.unsaved:
            self._look(way, num_blocks, hashes, frozenset(hashes[: len(hits)]))
        if not way.unsaved or now >= way.deadline:
            self._end(way)
        return way.is_over

    def ended(self, taker: Hashable) -> None:
        """Hears that the taker has its blocks, or needs none any more. Idempotent."""
        way = self._ways.pop(taker, None)
        if way is not None:
            self._end(way)

    def _look(self, way: Way, num_blocks: int, hashes: Sequence[bytes], hits: Container[bytes]) -> None:
        """Finds what is to be saved, and keeps what is. Of more than half of the host the coldest blocks are lost."""
        goes = self._goes(num_blocks, hits)
        unsaved = [each for each in goes if each not in way.refused and self._is_unsaved(each)]
        if not unsaved:
            return
        self._keep(way, {each for each in chain(goes, hashes) if self._host.is_ready(each)})
        taken = sum(len(each.kept) + len(each.unsaved) for each in self._ways.values())
        room = max(0, -(-self._host.capacity // 2) - taken)
        # Parents come before children, and what is warmer before what is colder: if time runs out, that is lost.
        way.unsaved.extend(unsaved[::-1][:room])
        way.wanted.update(way.unsaved)

    def _goes(self, num_blocks: int, hits: Container[bytes]) -> list[bytes]:
        """What the pool loses to who takes so many blocks that no launched step may write. Blocks that hold nothing may
        be among those that one may: as many more can go."""
        num_cooling = self._pool.num_free - self._pool.num_grantable
        goes: list[bytes] = []
        begin, more = 0, num_blocks
        while more:
            cold = self._pool.cold_end(more, begin)
            going = [each for each in cold if each not in hits]
            num_stay = min(more - len(cold), num_cooling)
            num_cooling -= num_stay
            goes += going
            begin, more = begin + more, len(cold) - len(going) + num_stay
        return goes

    # --- what is saved --------------------------------------------------------------------------------------

    @property
    def has_unsaved(self) -> bool:
        return any(way.unsaved for way in self._ways.values())

    def next(self, limit: int) -> list[bytes]:
        """Up to `limit` blocks that are to be saved next, for who asked first."""
        found: dict[bytes, None] = {}
        for way in self._ways.values():
            self._drop_done(way)
            for block_hash in way.unsaved:
                if len(found) == limit:
                    return list(found)
                if self._lacks(block_hash):
                    found[block_hash] = None
        return list(found)

    def skip(self, block_hash: bytes) -> bool:
        """Hears that the host has no room for a block. False: nobody waits for that one."""
        waiting = [way for way in self._ways.values() if block_hash in way.unsaved]
        for way in waiting:
            way.unsaved.remove(block_hash)
            way.refused.add(block_hash)
        return bool(waiting)

    def on_saved(self, block_hash: bytes) -> None:
        """Hears that a block is on the host."""
        for way in self._ways.values():
            if block_hash in way.wanted and block_hash not in way.kept:
                self._host.pin((block_hash,))
                way.kept.add(block_hash)

    def _drop_done(self, way: Way) -> None:
        """Drops leading blocks that are saved, or that the pool has no more."""
        while way.unsaved and not self._is_unsaved(way.unsaved[0]):
            way.unsaved.popleft()

    def _is_unsaved(self, block_hash: bytes) -> bool:
        is_written = block_hash in self._host and not self._host.is_ready(block_hash)
        return is_written or self._lacks(block_hash)

    # --- what is kept ---------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Lets the host evict again what was kept for who has taken, or was to. To be called after each turn, when the
        host knows what the pool has lost: what the pool still has would go first."""
        for way in self._ways.values():
            if not way.is_over and self._clock() >= way.deadline:
                self._end(way)
        for way in self._ended:
            self._host.unpin(way.kept)
            way.kept.clear()
        self._ended.clear()

    def flush(self) -> None:
        """Ends all ways, so that nothing on the host is kept for them."""
        for way in self._ways.values():
            self._end(way)
        self.let_go()

    def _keep(self, way: Way, hashes: set[bytes]) -> None:
        self._host.unpin(way.kept - hashes)
        self._host.pin(hashes - way.kept)
        way.kept = hashes

    def _end(self, way: Way) -> None:
        if not way.is_over:
            way.is_over = True
            way.unsaved.clear()
            way.wanted.clear()
            self._ended.append(way)

    def check_integrity(self) -> None:
        for way in (*self._ways.values(), *self._ended):
            assert not (way.is_over and way.unsaved), "what nobody waits for is saved"
            assert all(map(self._host.is_ready, way.kept)), "what was kept is gone"
