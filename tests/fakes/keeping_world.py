"""Two or three nodes that leave blocks to each other (docs/kept_once.md), as real pools, host tables, write-backs and
questions, over a Redis of a few dictionaries, and all that may happen between them.

A prompt has `depth` blocks, each of which is reached through the one before. Requests compute or find its beginning and
end at once, or run on; others press, so that a pool reuses its coldest block; the step loop turns; what is saved
arrives; events are published; nodes look what peers hold; and answers grow old. Each of these may come late. A block
that ages, which means that it is pressed out before it is saved though nobody keeps it, costs one of `most_aged`.

With a `window` each block has a window block. What runs on may pass them by, so that they are pressed out first, and a
block is left that is bare; what is computed again takes its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keeping_redis import KEYS, Server

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.kept import LEASE_S, KeptElsewhere
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.peers_blocks import PeersBlocks
from tandem.kv_connector.directory.publisher import write_batch
from tandem.kv_connector.directory.records import TIERS, WHOLE, NodeRecord, encode
from tandem.kv_connector.directory.spare_blocks import SpareBlocks
from tandem.kv_connector.directory.whole_blocks import WholeBlocks
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Save
from tandem.kv_connector.tiers.write_back import WriteBack

CHAIN = tuple(bytes([letter]) * 16 for letter in b"pqrs")  # a prompt's blocks
Event = tuple  # what, and how deep


class NotingPool(BlockPool):
    """A pool that notes which hashes went ahead of others and were not used since."""

    def __init__(self, num_blocks: int, window: BlockWindow) -> None:
        super().__init__(num_blocks, enable_caching=True, window=window)
        self.ahead: set[bytes] = set()

    def reuse_first(self, hashes: Sequence[bytes]) -> None:
        self.ahead.update(hashes)
        super().reuse_first(hashes)

    def _leave_free_queue(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            self.ahead.discard(block_hash)
        super()._leave_free_queue(block_id)

    def _put_in_place_of(self, known: int, block_id: int, block_hash: bytes, step: int) -> None:
        self.ahead.discard(block_hash)
        super()._put_in_place_of(known, block_id, block_hash, step)

    def _forget(self, block_hash: bytes) -> None:
        super()._forget(block_hash)
        self.ahead = {each for each in self.ahead if self.find(each) is not None}

    def num_parts(self, block_hash: bytes) -> int:
        """0: it is not cached; 1: bare; 2: whole."""
        block_id = self.find(block_hash)
        return 0 if block_id is None else 1 + self.windows.is_whole(block_id)


Told = tuple[frozenset[bytes], frozenset[bytes]]  # what a node has in Redis: blocks, and those that are whole


@dataclass(frozen=True)
class Setting:
    name: str
    nodes: tuple[str, ...]
    cached: tuple[int, ...]  # blocks of the prompt that each node has when everything begins
    num_blocks: int = 3
    depth: int = 2
    num_host: int = 4
    most_used: int = 3  # requests
    most_aged: int = 0
    window: int = 0  # blocks of one token that a row sees through window blocks, itself included; 0: there are none
    bare: tuple[int, ...] = ()  # with a window: how many of each node's first blocks are bare when everything begins
    make_spare: Any = SpareBlocks
    make_kept: Any = KeptElsewhere


class Node:
    """One node's decisions. An event changes it; `told` is what it has in Redis."""

    def __init__(self, setting: Setting, index: int) -> None:
        name, num_cached = setting.nodes[index], setting.cached[index]
        self.now = 0.0
        self.name, self.depth, self.record = name, setting.depth, record_of(name)
        self.window = BlockWindow(setting.window, 1, 1) if setting.window else NO_WINDOW
        self.pool = NotingPool(setting.num_blocks, self.window)
        self.host = TierIndex(setting.num_host, no_quota) if setting.num_host else None
        self.kept = setting.make_kept(self.time)
        self.back = None if self.host is None else WriteBack(self.pool, self.host, None, self.tell, 4, self.kept)
        self.spare = setting.make_spare(self.pool, self.kept, self.is_only_way)
        self.whole = WholeBlocks(self.pool, self.is_whole_below) if setting.window else None
        self.news: list[BlockEvent] = []
        self.peers = PeersBlocks(self.kept, self.record, KEYS)
        self.view = OwnView(NodeKey(name, 1))
        self.server = Server()
        self.saves: list[Save] = []
        self.held: list[int] = []
        self.num_passed = 0  # of `held`
        self.aged: set[bytes] = set()
        if num_cached:
            self.do(("use", num_cached), {})
            for block_id in self.pool.match_prefix(CHAIN[: setting.bare[index] if setting.window else 0]):
                self.pool.windows.reuse(self.pool.windows.of(block_id)[0])
        self.do(("turn",), {})

    def time(self) -> float:
        return self.now

    def is_only_way(self, block_hash: bytes) -> bool:
        return self.back is not None and self.back.is_only_way(block_hash)

    def is_whole_below(self, block_hash: bytes) -> bool:
        return self.host is not None and self.host.is_whole(block_hash)

    def tell(self, event: BlockEvent) -> None:
        self.view.record([event])
        self.news.append(event)

    # --- what can happen ------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        for depth in range(1, self.depth + 1):
            yield "use", depth
            if not self.held:
                yield "hold", depth
        if self.held:
            yield ("release",)
            if self.num_passed < self.window.num_passed(len(self.held)):
                yield ("pass",)
        yield from (("press",), ("turn",), ("look",))
        if self.saves:
            yield ("saved",)
        if self.is_fresh:
            yield ("lapse",)

    @property
    def is_fresh(self) -> bool:
        return bool(self._known())

    def _known(self) -> frozenset[bytes]:
        """What peers are known to keep, if nothing counts for longer than it may."""
        read_at, held, _ = self.kept._answer
        return held if self.now - read_at <= LEASE_S else frozenset()

    def do(self, event: Event, others: Mapping[str, Told]) -> None:
        """Raises AssertionError where a promise is broken that one node can break."""
        what, *depth = event
        if what in ("use", "hold"):
            self._use(CHAIN[: depth[0]], what == "hold")
        elif what == "release":
            self.pool.free(self.held, None, self.num_passed)
            self.held, self.num_passed = [], 0
        elif what == "pass":
            passed = self.window.num_passed(len(self.held))
            self.pool.windows.pass_by(self.held[self.num_passed : passed], None)
            self.num_passed = passed
        elif what == "press":
            empty = sum(self.pool.windows.found_as(each) is None for each in self.pool._free)
            self._allocate(empty + 1, empty + 1, lambda blocks: self.pool.free(blocks, None))
        elif what == "turn":
            self._turn()
        elif what == "saved":
            assert self.back is not None
            self.back.on_done(JobDone(self.saves.pop(0), 0.0))
        elif what == "look":
            self._look(others)
        else:
            self.now += LEASE_S + 0.1
        self.pool.check_integrity()

    def _use(self, hashes: Sequence[bytes], is_held: bool) -> None:
        hits = self.pool.windows.usable(self.pool.match_prefix(hashes))
        self.pool.touch(hits)
        num_passed = self.window.num_passed(len(hits)) if self.pool.windows.num_each else 0
        if num_passed:
            self.pool.windows.pass_by(hits[:num_passed], None)

        def fill(blocks: list[int]) -> None:
            for index, block_id in enumerate(blocks, len(hits)):
                self.pool.register(block_id, hashes[index], hashes[index - 1] if index else None)
            if self.host is not None:
                self.host.use(hashes)
            if is_held:
                self.held, self.num_passed = [*hits, *blocks], num_passed
            else:
                self.pool.free([*hits, *blocks], None, num_passed)

        if not self._allocate(len(hashes) - len(hits), 0, fill):
            self.pool.free(hits, None, num_passed)

    def _allocate(self, num: int, num_bare: int, use: Any) -> bool:
        """Takes blocks, whatever they hold, and says whether there are so many."""
        pool = self.pool
        if (cost := pool.cost(num, num_bare)) > pool.num_free:
            return False
        before = {each: pool.num_parts(each) for each in pool.cached_hashes()}
        saved = {each for each, num_parts in before.items() if self._num_saved(each) >= num_parts}
        promised = {each for each in before if each in pool.ahead or self._is_known(each)}
        taken = [pool.windows.found_as(each) for each in list(pool._free)[:cost]]
        ages = any(each is not None and each not in saved and not self._is_promised(each) for each in taken)
        blocks = pool.allocate(num, num_bare)
        assert blocks is not None
        gone = [each for each, num in before.items() if pool.num_parts(each) < num and each not in saved]
        if ages:
            self.aged.update(gone)
        else:
            assert promised.issuperset(gone), "what was dropped nobody said to keep since it was used here"
        use(blocks)
        return True

    def _is_promised(self, block_hash: bytes) -> bool:
        """Whether the node lets it go since a peer is said to keep it."""
        return block_hash in self.pool.ahead or (self.back is not None and self.back._is_left(block_hash))

    def _is_known(self, block_hash: bytes) -> bool:
        """Whether a peer is said to keep what is here."""
        return self.kept.is_end(block_hash) or (self.pool.num_parts(block_hash) < 2 and block_hash in self.kept)

    def _num_saved(self, block_hash: bytes) -> int:
        if self.host is None or not self.host.is_ready(block_hash):
            return 0
        return 1 + self.host.is_whole(block_hash)

    def _turn(self) -> None:
        events, ahead = self.pool.drain_events(), set(self.pool.ahead)
        if self.back is not None:
            self.back.on_turn(events, False)
            self.saves += [job for job in self.back.drain_jobs() if isinstance(job, Save)]
        self.spare.on_turn()
        self.view.record(events)
        if self.whole is not None:
            self.view.record(self.whole.on_turn([*events, *self.news]))
        self.news.clear()
        for batch in self.view.number(self.view.take()):
            write_batch(self.server, KEYS, self.record, batch, 10.0)  # type: ignore[arg-type]
        assert self._known() >= self.pool.ahead - ahead, "given up for an old answer"
        assert self.told() == self._has(), "peers are told what is not so"

    def _look(self, others: Mapping[str, Told]) -> None:
        server = Server()
        for name, told in others.items():
            record = record_of(name)
            server.records[name] = encode(record)
            for tier, hashes in zip(("gpu", WHOLE), told, strict=True):
                server.sets[KEYS.blocks(record.owner, tier)] = set(hashes)
        self.peers.look(server)  # type: ignore[arg-type]

    # --- what it is -----------------------------------------------------------------------------------------

    def told(self) -> Told:
        """What it has in Redis."""
        sets = {tier: self.server.sets.get(KEYS.blocks(self.record.owner, tier), set()) for tier in (*TIERS, WHOLE)}
        return frozenset().union(*(sets[tier] for tier in TIERS)), frozenset(sets[WHOLE])

    def _has(self) -> Told:
        """What it has, on whatever tier."""
        held = {each for each in CHAIN if self.pool.find(each) is not None or self._num_saved(each)}
        whole = {each for each in held if max(self.pool.num_parts(each), self._num_saved(each)) == 2}
        return frozenset(held), frozenset(whole) if self.whole is not None else frozenset()

    def has_bare(self) -> bool:
        return any(self.pool.num_parts(each) == 1 for each in CHAIN)

    def num_found(self) -> tuple[int, ...]:
        """How many blocks requests would find here that share one, two, ... blocks with the prompt, in the pool and the
        host's memory together."""
        parts = [max(self.pool.num_parts(each), self._num_saved(each)) for each in CHAIN[: self.depth]]

        def is_end(num: int) -> bool:
            passed = self.window.num_passed(num) if self.pool.windows.num_each else 0
            return all(parts[:num]) and min(parts[passed:num], default=2) == 2

        return tuple(max(filter(is_end, range(most + 1))) for most in range(1, self.depth + 1))

    def content(self) -> tuple:
        """All that decides what follows, whatever the numbers of blocks and how often something has happened."""
        pool, kept, has_news = self.pool, self.kept, self.kept.num_answers != self.spare._num_answers
        host = () if self.host is None else self.host._entries.items()
        questions = kept.soon, kept.colder
        return (
            tuple((pool.windows.found_as(each), pool.windows.owner(each) is None) for each in pool._free),
            tuple(map(pool.num_parts, CHAIN)),
            tuple((pool.block_hash(each), pool.windows.is_whole(each)) for each in self.held),
            self.num_passed,
            tuple((event.block_hash, event.stored) for event in self.news) if self.whole is not None else (),
            frozenset(pool.windows._turned or ()),
            tuple((event.block_hash, event.stored) for event in pool._publication._events),
            frozenset(pool.ahead),
            tuple(sorted((name, each.is_ready, each.is_whole) for name, each in host)),
            frozenset() if self.back is None else frozenset(self.back._unsaved),
            tuple((job.hashes, tuple(self._is_whole(job))) for job in self.saves),
            (frozenset(kept.soon.hashes), kept.colder.hashes, *(frozenset(each.parent_of) for each in questions)),
            (self._answer(), self.is_fresh, has_news),
            frozenset(each for each in CHAIN if pool.goes_first(each)),
            self.told(),
            frozenset(self.aged),
        )

    def _answer(self) -> tuple[frozenset[bytes], ...]:
        """What it goes by of the directory's newest answer."""
        return tuple(frozenset(each for each in known if each in self.kept) for known in self.kept._answer[1:])

    def _is_whole(self, job: Save) -> Iterable[tuple[bool, ...]]:
        """Of each block, and of its window blocks, whether it is still what it was."""
        for block_id, window_ids, then in zip(job.block_ids, job.window_ids, job.generations, strict=True):
            blocks = zip((block_id, *window_ids), then, strict=True)
            yield tuple(self.pool.generation(each) == generation for each, generation in blocks)


def record_of(name: str) -> NodeRecord:
    return NodeRecord(node_id=name, epoch=1, role="unified", control_address="tcp://127.0.0.1:1")


def no_quota(tenant: bytes) -> None:
    return None
