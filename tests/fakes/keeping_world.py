"""Two or three nodes that leave blocks to each other (docs/kept_once.md), as real pools, host tables, write-backs and
questions, over a Redis of a few dictionaries, and all that may happen between them.

A prompt has `depth` blocks, each of which is reached through the one before. Requests compute or find its beginning and
end at once, or run on; others press, so that a pool reuses its coldest block; the step loop turns; what is saved
arrives; events are published; nodes look what peers hold; and answers grow old. Each of these may come late. A block
that ages, which means that it is pressed out before it is saved though nobody keeps it, costs one of `most_aged`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.kept import LEASE_S, KeptElsewhere
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.peers_blocks import PeersBlocks
from tandem.kv_connector.directory.publisher import write_batch
from tandem.kv_connector.directory.records import KeySpace, NodeRecord, encode
from tandem.kv_connector.directory.spare_blocks import SpareBlocks
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Save
from tandem.kv_connector.tiers.write_back import WriteBack

KEYS = KeySpace("t")
CHAIN = tuple(bytes([letter]) * 16 for letter in b"pqrs")  # a prompt's blocks
Event = tuple  # what, and how deep


class Server:
    """What the directory's own code asks of Redis, and of the servers of one."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.sets: dict[str, set[bytes]] = {}
        self._answers: list[Any] = []

    def client_for(self, key: str) -> Server:
        return self

    def pipeline(self, transaction: bool) -> Server:
        return self

    def __enter__(self) -> Server:
        self._answers = []
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute(self) -> list[Any]:
        return self._answers

    def smembers(self, key: str) -> list[bytes]:
        return [name.encode() for name in self.records]

    def get(self, key: str) -> bytes | None:
        return next((record for name, record in self.records.items() if KEYS.node(name) == key), None)

    def smismember(self, key: str, hashes: Sequence[bytes]) -> None:
        self._answers.append([each in self.sets.get(key, ()) for each in hashes])

    def sadd(self, key: str, *hashes: bytes) -> None:
        self.sets.setdefault(key, set()).update(hashes)

    def srem(self, key: str, *hashes: bytes) -> None:
        self.sets.get(key, set()).difference_update(hashes)

    def unlink(self, *keys: str) -> None:
        for key in keys:
            self.sets.pop(key, None)

    def set(self, *_: object) -> None: ...

    def incr(self, key: str) -> None: ...

    def pexpire(self, *_: object) -> None: ...

    def publish(self, *_: object) -> None: ...


class NotingPool(BlockPool):
    """A pool that notes which hashes went ahead of others and were not used since."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, enable_caching=True)
        self.ahead: set[bytes] = set()

    def reuse_first(self, hashes: Sequence[bytes]) -> None:
        self.ahead.update(hashes)
        super().reuse_first(hashes)

    def _leave_free_queue(self, block_id: int) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            self.ahead.discard(block_hash)
        super()._leave_free_queue(block_id)


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
    make_spare: Any = SpareBlocks
    make_kept: Any = KeptElsewhere


class Node:
    """One node's decisions. An event changes it; `told` is what it has in Redis."""

    def __init__(self, setting: Setting, name: str, num_cached: int) -> None:
        self.now = 0.0
        self.name, self.depth, self.record = name, setting.depth, record_of(name)
        self.pool = NotingPool(setting.num_blocks)
        self.host = TierIndex(setting.num_host, no_quota) if setting.num_host else None
        self.kept = setting.make_kept(self.time)
        self.back = None if self.host is None else WriteBack(self.pool, self.host, None, self.tell, 4, self.kept)
        self.spare = setting.make_spare(self.pool, self.kept, self.is_only_way)
        self.peers = PeersBlocks(self.kept, self.record, KEYS)
        self.view = OwnView(NodeKey(name, 1))
        self.server = Server()
        self.saves: list[Save] = []
        self.held: list[int] = []
        self.aged: set[bytes] = set()
        if num_cached:
            self.do(("use", num_cached), {})
        self.do(("turn",), {})

    def time(self) -> float:
        return self.now

    def is_only_way(self, block_hash: bytes) -> bool:
        return self.back is not None and self.back.is_only_way(block_hash)

    def tell(self, event: BlockEvent) -> None:
        self.view.record([event])

    # --- what can happen ------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        for depth in range(1, self.depth + 1):
            yield "use", depth
            if not self.held:
                yield "hold", depth
        if self.held:
            yield ("release",)
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
        read_at, held = self.kept._answer
        return held if self.now - read_at <= LEASE_S else frozenset()

    def do(self, event: Event, others: Mapping[str, frozenset[bytes]]) -> None:
        """Raises AssertionError where a promise is broken that one node can break."""
        what, *depth = event
        if what in ("use", "hold"):
            self._use(CHAIN[: depth[0]], what == "hold")
        elif what == "release":
            self.pool.free(self.held, None)
            self.held = []
        elif what == "press":
            empty = sum(self.pool.block_hash(each) is None for each in self.pool._free)
            self._allocate(empty + 1, lambda blocks: self.pool.free(blocks, None))
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
        hits = self.pool.match_prefix(hashes)
        self.pool.touch(hits)

        def fill(blocks: list[int]) -> None:
            for index, block_id in enumerate(blocks, len(hits)):
                self.pool.register(block_id, hashes[index], hashes[index - 1] if index else None)
            if self.host is not None:
                self.host.use(hashes)
            if is_held:
                self.held = [*hits, *blocks]
            else:
                self.pool.free([*hits, *blocks], None)

        if not self._allocate(len(hashes) - len(hits), fill):
            self.pool.free(hits, None)

    def _allocate(self, num: int, use: Any) -> bool:
        """Takes blocks, whatever they hold, and says whether there are so many."""
        if num > self.pool.num_free:
            return False
        taken = [self.pool.block_hash(each) for each in list(self.pool._free)[:num]]
        ages = any(each is not None and not self._has_saved(each) and not self._is_promised(each) for each in taken)
        promised = {each for each in self.pool.cached_hashes() if each in self._known() or each in self.pool.ahead}
        before = self.pool.cached_hashes()
        blocks = self.pool.allocate(num)
        assert blocks is not None
        gone = [each for each in before if self.pool.find(each) is None and not self._has_saved(each)]
        if ages:
            self.aged.update(gone)
        else:
            assert promised.issuperset(gone), "what was dropped nobody said to keep since it was used here"
        use(blocks)
        return True

    def _is_promised(self, block_hash: bytes) -> bool:
        """Whether the node lets it go since a peer is said to keep it."""
        is_left = self.back is not None and block_hash in self.kept and not self.is_only_way(block_hash)
        return block_hash in self.pool.ahead or is_left

    def _has_saved(self, block_hash: bytes) -> bool:
        return self.host is not None and self.host.is_ready(block_hash)

    def _turn(self) -> None:
        events, ahead = self.pool.drain_events(), set(self.pool.ahead)
        if self.back is not None:
            self.back.on_turn(events, False)
            self.saves += [job for job in self.back.drain_jobs() if isinstance(job, Save)]
        self.spare.on_turn()
        self.view.record(events)
        for batch in self.view.number(self.view.take()):
            write_batch(self.server, KEYS, self.record, batch, 10.0)  # type: ignore[arg-type]
        assert self._known() >= self.pool.ahead - ahead, "given up for an old answer"

    def _look(self, others: Mapping[str, frozenset[bytes]]) -> None:
        server = Server()
        for name, told in others.items():
            record = record_of(name)
            server.records[name] = encode(record)
            server.sets[KEYS.blocks(record.owner, "gpu")] = set(told)
        self.peers.look(server)  # type: ignore[arg-type]

    # --- what it is -----------------------------------------------------------------------------------------

    def told(self) -> frozenset[bytes]:
        """What it has in Redis."""
        return frozenset().union(*self.server.sets.values())

    def num_found(self) -> int:
        """How many blocks a request would find here, in the pool or the host's memory."""
        missing = (each for each in CHAIN[: self.depth] if self.pool.find(each) is None and not self._has_saved(each))
        return CHAIN.index(next(missing, CHAIN[self.depth]))

    def content(self) -> tuple:
        """All that decides what follows, whatever the numbers of blocks and how often something has happened."""
        pool, kept, has_news = self.pool, self.kept, self.kept.num_answers != self.spare._num_answers
        host = () if self.host is None else sorted((name, each.is_ready) for name, each in self.host._entries.items())
        return (
            tuple(pool.block_hash(each) for each in pool._free),
            len(self.held),
            tuple((event.block_hash, event.stored) for event in pool._publication._events),
            frozenset(pool.ahead),
            tuple(host),
            frozenset() if self.back is None else frozenset(self.back._unsaved),
            tuple((job.hashes, tuple(self._is_whole(job))) for job in self.saves),
            (frozenset(kept.soon), kept.colder, self._answer(), self.is_fresh, has_news),
            frozenset(each for each in CHAIN if pool.goes_first(each)),
            self.told(),
            frozenset(self.aged),
        )

    def _answer(self) -> frozenset[bytes]:
        """What it goes by of the directory's newest answer."""
        return frozenset(each for each in self.kept._answer[1] if each in self.kept)

    def _is_whole(self, job: Save) -> Iterable[bool]:
        pairs = zip(job.block_ids, job.generations, strict=True)
        return (self.pool.generation(block_id) == generation for block_id, generation in pairs)


def record_of(name: str) -> NodeRecord:
    return NodeRecord(node_id=name, epoch=1, role="unified", control_address="tcp://127.0.0.1:1")


def no_quota(tenant: bytes) -> None:
    return None
