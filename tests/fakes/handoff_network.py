"""Both hand-off managers, real pools, and between them a network and a transfer thread that do their worst.

Time is simulated and every choice comes from one seeded generator. Writes are one-sided: nothing stops one on its way
to the sink, so each checks that its block still belongs to its grant.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.messages import KVReady, NodeInfo, PeerRef, Submit, peer_id_of
from tandem.engine.request import Request
from tandem.engine.sampling_params import SamplingParams
from tandem.engine.security import ClusterKeys
from tandem.kv_connector.meta import Finalize, PushFailed, ReadySent, Retire, Retired, Verified
from tandem.kv_connector.outcomes import Commit
from tandem.kv_connector.peer_effects import Fenced, FenceSource
from tandem.kv_connector.sink import SinkManager
from tandem.kv_connector.source import SourceManager

BLOCK = 4
DEADLINE_S = 90.0
KEYS = ClusterKeys(b"k" * 16, False)


class Prefill:
    """One life of a source: its manager, a scheduler that computes a prompt in one step, its transfer queue."""

    def __init__(self, epoch: int, num_blocks: int) -> None:
        options = NodeOptions("prefill", ModelOptions("m"), CacheOptions(block_size=BLOCK, hash_block_size=BLOCK))
        self.epoch, self.info = epoch, NodeInfo(node_id="p", epoch=epoch, role="prefill")
        self.pool = BlockPool(num_blocks, enable_caching=True)
        self.manager = SourceManager(self.info, KEYS, self.pool, options)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.jobs: deque[Any] = deque()
        self.retired: set[int] = set()
        self.step_id = self.next_slot = 0  # slots are never reused here

    def step(self) -> None:
        for request in list(self.waiting):
            if self.manager.get_num_new_matched_tokens(request, 0) is None:
                continue
            blocks = self.pool.allocate(-(-request.num_prompt_tokens // BLOCK))
            if blocks is None:
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.block_ids, request.slot = blocks, self.next_slot
            self.next_slot += 1
            self.manager.update_state_after_alloc(request, blocks, 0)

    def compute(self, request: Request) -> None:
        self.running.remove(request)
        self.step_id += 1
        row = SimpleNamespace(slot=request.slot, start=0, num_tokens=request.num_prompt_tokens)
        meta = self.manager.build_connector_meta(SimpleNamespace(step_id=self.step_id, rows=(row,)))  # type: ignore[arg-type]
        self.pool.step_launched(self.step_id)
        self.jobs.extend((*meta.whole, *meta.pushes) if meta is not None else ())
        request.first_tokens = [(0, 1, False)]
        self.pool.step_completed(self.step_id)
        self.leave(request)

    def leave(self, request: Request) -> None:
        if not self.manager.request_finished(request, request.block_ids):
            self.pool.free(request.block_ids, None)

    def drop(self, key: tuple[str, int]) -> None:
        for request in [r for r in self.waiting + self.running if r.key == key]:
            (self.waiting if request in self.waiting else self.running).remove(request)
            self.leave(request)


class Decode:
    """One life of a sink."""

    def __init__(self, epoch: int, num_blocks: int) -> None:
        options = NodeOptions("decode", ModelOptions("m"), CacheOptions(block_size=BLOCK, hash_block_size=BLOCK))
        self.epoch, self.info = epoch, NodeInfo(node_id="d", epoch=epoch, role="decode")
        self.pool = BlockPool(num_blocks, enable_caching=True)
        self.manager = SinkManager(self.info, KEYS, self.pool, options)
        self.jobs: deque[Any] = deque()
        self.bytes: dict[int, tuple[int, bool]] = {}  # block -> (grant that wrote it last, right)
        self.line: list[Any] = []

    def land(self, grant: Any, blocks: tuple[int, ...], right: bool) -> None:
        if grant.sink_epoch != self.epoch:
            return  # another life's memory
        record = self.manager._records.get((grant.request_id, grant.attempt))
        held = record.granted if record is not None and record.grant is not None else []
        for block in blocks:
            assert block in held, "a write lands in a block that its grant no longer holds"
            self.bytes[block] = (grant.grant_id, right)

    def check_order(self) -> None:
        line = list(self.manager._queue)
        common = [record for record in self.line if record in line]
        assert line[: len(common)] == common, "claims changed their order"
        self.line = line


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now, self.lives = 1.0, 1
        self.faulty = True
        self.messages: list[tuple[float, str, str, Any]] = []  # (arrives, from, to, message)
        self.source = Prefill(1, self.random.randint(6, 10))
        self.sink = Decode(2, self.random.randint(6, 10))
        self.ghosts: list[Prefill] = []  # crashed sources whose writes are not yet fenced
        self.lost_at: list[tuple[float, Any]] = []
        self.ends: Counter[tuple[str, str]] = Counter()
        self.due: dict[str, set[str]] = {"source": set(), "sink": set()}
        self.cancelled: set[str] = set()
        self._meet()

    def _meet(self) -> None:
        self.source.manager.peer_connected(self.sink.info)
        self.sink.manager.peer_connected(self.source.info)

    def run(self) -> None:
        for number in range(self.random.randint(3, 6)):
            self._submit(f"r{number}")
            for _ in range(self.random.randint(0, 6)):
                self._turn()
        for _ in range(120):
            self._turn()
        self.faulty = False
        while self.now < 700:
            self._turn()
        self._check_end()

    def _submit(self, name: str) -> None:
        prompt = np.zeros(self.random.randint(1, 5 * BLOCK), np.int32)
        peer = PeerRef("p", self.source.epoch, "")
        submit = Submit(
            request_id=name, attempt=0, mode="decode", prompt_token_ids=prompt.tobytes(), sampling=SamplingParams(),
            peer=peer, deadline_s=DEADLINE_S,
        )  # fmt: skip
        request = Request(name, 0, prompt, SamplingParams(), mode="prefill")
        sides = ["source", "sink"]
        self.random.shuffle(sides)
        for side in sides:
            self.due[side].add(name)
            if side == "source":
                sink = PeerRef("d", self.sink.epoch, "")
                self.source.manager.expect(name, 0, sink, len(prompt), self.now + DEADLINE_S)
                self.source.waiting.append(request)
            else:
                self.sink.manager.expect(submit, Request(name, 0, prompt, SamplingParams()), self.now)
            if self.random.random() < 0.3:
                self._turn()

    def _turn(self) -> None:
        slow = self.faulty and self.random.random() < 0.9
        self.now += self.random.uniform(0.05, 0.6) if slow else 2.0
        if self.faulty:
            self._mischief()
        for message in [m for m in self.messages if m[0] <= self.now]:
            self.messages.remove(message)
            self._deliver(message)
        for when, lost in [entry for entry in self.lost_at if entry[0] <= self.now]:
            self.lost_at.remove((when, lost))
            lost()
        self.source.step()
        for request in list(self.source.running):
            if not self.faulty or self.random.random() < 0.4:
                self.source.compute(request)
        self._transfer()
        self.source.manager.on_tick(self.now)
        self.sink.manager.on_tick(self.now)
        self._drain()

    def _mischief(self) -> None:
        dice = self.random.random()
        if dice < 0.01:
            self._crash_source()
        elif dice < 0.02:
            self._crash_sink()
        elif dice < 0.05 and self.due["sink"] | self.due["source"]:
            name = self.random.choice(sorted(self.due["sink"] | self.due["source"]))
            self.cancelled.add(name)
            self.source.manager.cancel(name, 0, self.now)
            self.source.drop((name, 0))
            self.sink.manager.cancel(name, 0, self.now)

    def _crash_source(self) -> None:
        old = self.source
        self.ghosts.append(old)
        self.due["source"].clear()
        self.lives += 1
        self.source = Prefill(2 * self.lives + 1, old.pool.num_blocks)
        sink = self.sink
        self.lost_at.append((self.now + 5.0, lambda: sink.manager.peer_lost("p", old.epoch)))
        self._meet()

    def _crash_sink(self) -> None:
        old, source = self.sink, self.source
        self.due["sink"].clear()
        self.lives += 1
        self.sink = Decode(2 * self.lives, old.pool.num_blocks)
        self.lost_at.append((self.now + 5.0, lambda: source.manager.peer_lost("d", old.epoch)))
        self._meet()

    def _deliver(self, entry: tuple[float, str, str, Any]) -> None:
        _, sender, to, message = entry
        for node in (self.source, self.sink):
            if to == peer_id_of(node.info.node_id, node.epoch):
                node.manager.on_message(sender, message, self.now)
                self._drain()

    def _drain(self) -> None:
        for node in (self.source, self.sink):
            me = peer_id_of(node.info.node_id, node.epoch)
            for to, message in node.manager.drain_outbox():
                self._post(me, to, message)
            node.jobs.extend(node.manager.drain_jobs())
            node.manager.drain_transport_commands()
            for effect in node.manager.drain_peer_effects():
                if isinstance(effect, FenceSource):
                    self._fence(effect)
        self._take_outcomes()
        for node in (self.source, self.sink):
            node.manager.check_integrity()
            node.pool.check_integrity()
        self.sink.check_order()

    def _post(self, me: str, to: str, message: Any) -> None:
        copies = self.random.choice((0, 1, 1, 1, 2)) if self.faulty else 1
        for _ in range(copies):
            delay = self.random.choice((0.0, 0.1, 0.5, 3.0)) if self.faulty else 0.0
            self.messages.append((self.now + delay, me, to, message))

    def _fence(self, effect: FenceSource) -> None:
        sink = self.sink

        def fenced() -> None:
            self.ghosts = [ghost for ghost in self.ghosts if ghost.epoch != effect.epoch]
            sink.manager.on_transfer_event(Fenced(effect.node_id, effect.epoch), self.now)

        self.lost_at.append((self.now + 1.0, fenced))

    def _take_outcomes(self) -> None:
        for ended in self.source.manager.drain_events():
            self.ends["source", ended.key[0]] += 1
            self.source.drop(ended.key)
        for outcome in self.sink.manager.drain_events():
            self.ends["sink", outcome.request.request_id] += 1
            if isinstance(outcome, Commit):
                whole = [self.sink.bytes.get(block, (0, False))[1] for block in outcome.block_ids]
                assert all(whole), "committed a block that was not wholly written"
                self.sink.pool.free(list(outcome.block_ids), None)

    # --- the transfer threads -------------------------------------------------------------------------------

    def _transfer(self) -> None:
        for node in (self.source, *self.ghosts):
            while node.jobs and (not self.faulty or self.random.random() < 0.6):
                self._do(node, node.jobs.popleft())
        while self.sink.jobs and (not self.faulty or self.random.random() < 0.6):
            job = self.sink.jobs.popleft()
            right = [self.sink.bytes.get(block) == (job.grant_id, True) for block in job.block_ids]
            bad = tuple(index for index, good in enumerate(right) if not good)
            self.sink.manager.on_transfer_event(Verified(job.key, job.grant_id, job.round, bad), self.now)

    def _do(self, node: Prefill, job: Any) -> None:
        event: Any = None
        if isinstance(job, Retire):
            node.retired.add(job.grant_id)
            event = Retired(job.key, job.grant_id)
        elif job.grant_id in node.retired:
            return
        elif isinstance(job, Finalize):
            event = self._ready(node, job)
        elif self.faulty and self.random.random() < 0.03:
            event = PushFailed(job.key, job.grant_id, "broken")
        else:
            right = not self.faulty or self.random.random() > 0.15
            self.sink.land(job.grant, job.destination_block_ids, right)
        if event is not None and node is self.source:
            node.manager.on_transfer_event(event, self.now)
            self._drain()

    def _ready(self, node: Prefill, job: Finalize) -> ReadySent:
        grant = job.grant
        ready = KVReady(
            request_id=grant.request_id, attempt=0, grant_id=grant.grant_id, grant_signature=grant.signature,
            source_id="p", source_epoch=node.epoch, sink_epoch=grant.sink_epoch, first_tokens=job.first_tokens,
            digests=b"d" * 8 * len(grant.block_ids), round=job.round,
        )  # fmt: skip
        self._post(peer_id_of("p", node.epoch), peer_id_of("d", grant.sink_epoch), ready)
        return ReadySent(job.key, grant.grant_id, ready)

    # --- the end --------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        for side, names in self.due.items():
            for name in names:
                count = self.ends[side, name]
                assert count == 1 or (count == 0 and name in self.cancelled), f"{side} of {name} ended {count} times"
        for node in (self.source, self.sink):
            assert node.pool.num_free == node.pool.num_blocks, f"{node.info.node_id} leaks blocks"
            assert not node.manager._records, f"{node.info.node_id} keeps records"
        assert self.sink.manager.num_quarantined == 0
