"""Nodes that pull from each other, with real managers and pools: memory, transfer threads and network in short.

A block's content is the hash that it was computed for; whatever is cached must hold its own. `one_sided`: writes land
whether their grant is open or not, and no fence of a node that lives ever ends.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from typing import Any

import numpy as np

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, Timeouts
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVGrant, KVPull, KVReady, KVRelease  # fmt: skip
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef, PrefixHint  # fmt: skip
from tandem.engine.scheduling.ports import NoTiers
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import (
    CloseGrant,
    Finalize,
    OpenGrant,
    ReadySent,
    Retire,
    Retired,
    TransferJob,
    Verified,
    Verify,
)
from tandem.kv_connector.protocol.outcomes import Fetched, NotFetched, SourceOutcome
from tandem.kv_connector.protocol.peer_effects import Fenced, FenceSource
from tandem.node.handoffs import Handoffs
from tests.fakes.made_requests import made_request

BLOCK = 4
LAYOUT = KVLayout((KVGroup(1, 1, 1, "float32"),), BLOCK)
TIMES = Timeouts(pull_s=5.0, resend_s=0.5, connect_s=3.0)
NOTHING = b"?" * 16


def kept_beside(block_hash: bytes, place: int) -> bytes:
    """The content of a block's window block."""
    return bytes([255 - place]) + block_hash[1:]


def chain(seed: int, num_blocks: int) -> list[bytes]:
    """Hashes of a prompt; those of one seed share their prefix."""
    return [bytes([seed, index]) * 8 for index in range(num_blocks)]


class PullNode:
    """One node's managers as a node has them."""

    def __init__(self, name: str, num_blocks: int, num_windows: int = 0) -> None:
        options = NodeOptions("unified", ModelOptions("m"), CacheOptions(BLOCK, BLOCK), timeouts=TIMES)
        keys = ClusterKeys(b"k" * 16, False)
        self.info = NodeInfo(node_id=name, epoch=ord(name), role="unified", layout=LAYOUT)
        slides = BlockWindow(2 * BLOCK, BLOCK, num_windows) if num_windows else NO_WINDOW
        self.pool = BlockPool(num_blocks, enable_caching=True, window=slides)
        self.handoffs = Handoffs(self.info, keys, self.pool, options, NoTiers(), Rate())
        self.source, self.sink = self.handoffs.source, self.handoffs.sink
        self.puller, self.pull_server = self.handoffs.puller, self.handoffs.pull_server
        self.content = [NOTHING] * num_blocks
        self.jobs: deque[Any] = deque()
        self.open: set[int] = set()
        self.retired: set[int] = set()
        self.waiting: list[Request] = []
        self.num_computed = 0  # blocks

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.info.node_id, self.info.epoch, "")

    def schedule(self, request: Request) -> bool:
        """Starts and ends `request`, if it waits for nothing."""
        hashes, pool = request.block_hashes, self.pool
        hits = pool.windows.usable(pool.match_prefix(hashes))
        if not pool.reservations.make_room(pool.cost(len(hashes) - len(hits)), Kind.START, request, hits):
            return False
        if self.puller.prepare(request, hashes, hits, runs_alone=len(self.waiting) == 1) is None:
            return False
        self.waiting.remove(request)
        num_passed = pool.window.num_passed(len(hits) * BLOCK)
        pool.touch(hits, num_passed)
        for index, block_id in list(enumerate(hits))[num_passed:] if pool.windows.num_each else ():
            assert pool.windows.is_whole(block_id)
            for place, each in enumerate(pool.windows.of(block_id)):
                assert self.content[each] == kept_beside(hashes[index], place), "a row would read another's bytes"
        new = pool.allocate(len(hashes) - len(hits))
        assert new is not None
        self.puller.started(request, hashes)
        self.num_computed += len(new)
        for index, block_id in enumerate(new, len(hits)):
            self.content[block_id] = hashes[index]
            for place, each in enumerate(pool.windows.of(block_id)):
                self.content[each] = kept_beside(hashes[index], place)
            pool.register(block_id, hashes[index], hashes[index - 1] if index else None)
        self.puller.ended(request)
        passed = [*hits, *new][num_passed : pool.window.num_passed(len(hashes) * BLOCK)]
        if pool.windows.num_each:
            pool.windows.pass_by(passed, None)
        pool.free([*hits, *new], None, num_passed + len(passed))
        return True

    def check(self) -> None:
        for part in (self.pool, self.source, self.sink, self.puller):
            part.check_integrity()  # type: ignore[attr-defined]
        for block_id, content in enumerate(self.content):
            block_hash = self.pool.block_hash(block_id)
            assert block_hash in (None, content), f"{self.info.node_id}: block {block_id} holds another's bytes"
            for place, each in enumerate(self.pool.windows.of(block_id) if block_hash is not None else ()):
                assert self.content[each] == kept_beside(block_hash, place), "a window block holds another's bytes"  # type: ignore[arg-type]


class PullWorld:
    """`post` is what has been sent and not arrived; nothing arrives by itself."""

    def __init__(
        self, *num_blocks: int, one_sided: bool = False, rng: random.Random | None = None, num_windows: int = 0
    ) -> None:
        self.nodes = [PullNode("abc"[index], count, num_windows) for index, count in enumerate(num_blocks)]
        self.one_sided, self.rng, self.now = one_sided, rng or random.Random(0), 1.0
        self.post: list[tuple[PullNode, PullNode, Any]] = []
        self._names = itertools.count()
        for one, other in itertools.permutations(self.nodes, 2):
            self._greet(one, other)

    # --- what may happen ------------------------------------------------------------------------------------

    def submit(self, node: int, hashes: list[bytes], holder: int | None = None) -> Request:
        ids = np.zeros(len(hashes) * BLOCK + 1, np.int32)
        request = made_request(f"r{next(self._names)}", ids, hashes=hashes)
        if holder is not None:
            self.nodes[node].puller.want(request, PrefixHint(self.nodes[holder].ref, len(hashes) * BLOCK))
        self.nodes[node].waiting.append(request)
        return request

    def schedule(self) -> None:
        for node in self.nodes:
            for request in list(node.waiting):
                node.schedule(request)
        self._settle()

    def cancel(self, node: PullNode, request: Request) -> None:
        node.waiting.remove(request)
        node.puller.ended(request)
        self._settle()

    def deliver(self, letter: tuple[PullNode, PullNode, Any], keep: bool = False) -> None:
        if not keep:
            self.post.remove(letter)
        sender, to, message = letter
        if isinstance(message, KVPull):
            to.pull_server.on_pull(sender.info.key, message, self.now)
        elif isinstance(message, KVClaim | KVReady | KVRelease | KVDrained):
            to.sink.on_message(sender.info.key, message, self.now)
        else:
            to.source.on_message(sender.info.key, message, self.now)
        self._settle()

    def transfer(self, node: PullNode, corrupt: bool = False) -> None:
        """The next job of a node's transfer thread."""
        job = node.jobs.popleft()
        if isinstance(job, Verify):
            expected = [job.digests[i : i + 8] for i in range(0, len(job.digests), 8)]
            found = [node.content[block_id][:8] for block_id in job.block_ids]
            bad = tuple(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
            node.sink.on_transfer_event(Verified(job.key, job.grant_id, job.round, bad), self.now)
        elif isinstance(job, Retire):
            node.source.on_transfer_event(Retired(job.key, job.grant_id), self.now)
        elif job.grant_id not in node.retired:
            self._run_source_job(node, job, corrupt)
        self._settle()

    def lose_each_other(self, one: PullNode, other: PullNode, forgets: bool = False) -> None:
        """As both control planes do after silence; what was under way between them is gone. `forgets`: `one` was silent
        and does not know it; `other`, which lives, tells it."""
        self.post = [letter for letter in self.post if {letter[0], letter[1]} != {one, other}]
        for me, peer in ((one, other), (other, one)):
            if forgets and me is one:
                me.source.peers.forgot(peer.info.key, self.now)
            else:
                me.source.peers.lost(peer.info.key)
            me.sink.peers.lost(peer.info.key)
            me.pull_server.peer_lost(peer.info.key)
            self._settle()
            me.puller.peer_lost(peer.info.key)
            self._settle()
        for me, peer in ((one, other), (other, one)):
            self._greet(me, peer)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            for part in (node.puller, node.pull_server, node.source, node.sink):
                part.on_tick(self.now)  # type: ignore[attr-defined]
        self._settle()

    def run(self, turns: int = 60) -> None:
        """Everything goes well from here on, until nothing more happens."""
        for _ in range(turns):
            self.schedule()
            while self.post or any(node.jobs for node in self.nodes):
                for node in self.nodes:
                    if node.jobs:
                        self.transfer(node)
                if self.post:
                    self.deliver(self.post[0])
            self.tick(0.6)

    def check_whole(self) -> None:
        for node in self.nodes:
            assert not node.waiting, "a request never started"
            assert node.pool.num_free == node.pool.num_blocks, f"{node.info.node_id} leaks blocks"
            assert node.pool.reservations.is_empty, f"{node.info.node_id} leaks holds"
            assert node.source.ledger.is_idle
            assert node.sink.ledger.is_idle
            assert node.pull_server.is_idle

    # --- inside ---------------------------------------------------------------------------------------------

    def _greet(self, me: PullNode, peer: PullNode) -> None:
        me.sink.peers.connected(peer.info)
        me.source.peers.connected(peer.info)
        me.puller.peer_connected(peer.info)
        self._settle()

    def _run_source_job(self, node: PullNode, job: Any, corrupt: bool) -> None:
        grant = job.grant
        sink = next(each for each in self.nodes if each.info.node_id == grant.sink_id)
        if isinstance(job, Finalize):
            ready = KVReady(
                request_id=grant.request_id, attempt=grant.attempt, grant_id=grant.grant_id,
                grant_signature=grant.signature, source_id=node.info.node_id, source_epoch=node.info.epoch,
                sink_epoch=grant.sink_epoch, first_tokens=(), round=job.round,
                digests=b"".join(node.content[block_id][:8] for block_id in job.source_block_ids),
            )  # fmt: skip
            self.post.append((node, sink, ready))
            node.source.on_transfer_event(ReadySent(job.key, grant.grant_id, ready), self.now)
        elif self.one_sided or grant.grant_id in sink.open:
            record = sink.sink.ledger.records[grant.request_id, grant.attempt]
            for source, destination in zip(job.source_block_ids, job.destination_block_ids, strict=True):
                assert node.pool.ref_count(source) > 0, "a push reads a block that was freed"
                held = sink.sink.ledger.granted_ids(record)
                assert destination in held, "a write lands in a block that its grant no longer holds"
                sink.content[destination] = NOTHING if corrupt else node.content[source]

    def _settle(self) -> None:
        """What the managers want done, but for what takes time."""
        for node in self.nodes:
            while effects := [*node.source.drain_effects(), *node.sink.drain_effects()]:
                for effect in effects:
                    self._carry_out(node, effect)
            node.puller.drain_connects()
            for to, message in node.puller.drain_outbox() + node.pull_server.drain_outbox():
                self._send(node, to, message)
            node.check()

    def _carry_out(self, node: PullNode, effect: Any) -> None:
        if isinstance(effect, Send):
            if isinstance(effect.message, KVGrant):
                assert effect.message.grant_id in node.open, "a source hears of a grant that is not open"
            self._send(node, effect.to, effect.message)
        elif isinstance(effect, Fetched | NotFetched):
            node.puller.on_outcome(effect)
        elif isinstance(effect, SourceOutcome):
            assert node.pull_server.on_outcome(effect), "a hand-off that was no pull"
        elif isinstance(effect, FenceSource) and not self.one_sided:
            source = next(each for each in self.nodes if each.info.node_id == effect.node.node_id)
            source.jobs = deque(job for job in source.jobs if _lands_elsewhere(job, node))
            node.sink.on_transfer_event(Fenced(effect.node), self.now)
        elif isinstance(effect, OpenGrant):
            node.open.add(effect.grant.grant_id)
        elif isinstance(effect, CloseGrant):
            node.open.discard(effect.grant_id)
        elif isinstance(effect, TransferJob):
            node.jobs.append(effect)
            if isinstance(effect, Retire):
                node.retired.add(effect.grant_id)

    def _send(self, node: PullNode, key: NodeKey, message: Any) -> None:
        to = next(each for each in self.nodes if each.info.key == key)
        self.post.append((node, to, message))


def _lands_elsewhere(job: Any, sink: PullNode) -> bool:
    """Not a push into `sink`, whose fence makes it vain."""
    return isinstance(job, Finalize | Retire | Verify) or job.grant.sink_id != sink.info.node_id
