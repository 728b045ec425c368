"""Both hand-off managers, real pools, and between them a network and a transfer thread that do their worst.

Time is simulated and every choice comes from one seeded generator. Writes are one-sided: nothing stops one on its way
to the sink, so each checks that its block still belongs to its grant.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.handoff import KVReady
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import Finalize, PushFailed, ReadySent, Retire, Retired, TransferJob, Verified
from tandem.kv_connector.protocol.outcomes import Commit, SinkOutcome, SourceOutcome
from tandem.kv_connector.protocol.peer_effects import Fenced, FenceSource
from tests.fakes.handoff_nodes import BLOCK, Decode, Prefill
from tests.fakes.made_requests import made_request

DEADLINE_S = 90.0


class World:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sink_block = random.Random(f"block size {seed}").choice((BLOCK, 3, 2 * BLOCK))
        self.now, self.lives = 1.0, 1
        self.faulty = True
        self.messages: list[tuple[float, str, str, Any]] = []  # (arrives, from, to, message)
        self.source = Prefill(1, self.random.randint(6, 10))
        self.sink = Decode(2, self._in_sink_blocks(self.random.randint(6, 10)), self.sink_block)
        self.ghosts: list[Prefill] = []  # crashed sources whose writes are not yet fenced
        self.unfenced: list[tuple[Decode, FenceSource]] = []  # of a source that lives: done when it exits
        self.lost_at: list[tuple[float, Any]] = []
        self.is_cut = False  # the link between the two
        self.num_submitted = 0
        self.stalls_until = 0.0  # the sources' transfer threads
        self.ends: Counter[tuple[str, str]] = Counter()
        self.due: dict[str, set[str]] = {"source": set(), "sink": set()}
        self.cancelled: set[str] = set()
        self._meet()

    def _in_sink_blocks(self, num_blocks: int) -> int:
        """Room for as many tokens as `num_blocks` of the source's size hold, and for one block beside a prompt."""
        return num_blocks if self.sink_block == BLOCK else -(-num_blocks * BLOCK // self.sink_block) + 1

    def _meet(self) -> None:
        self.is_cut = False
        self.source.manager.peers.connected(self.sink.info)
        self.sink.manager.peers.connected(self.source.info)

    def run(self) -> None:
        for _ in range(self.random.randint(3, 6)):
            self._submit()
            for _ in range(self.random.randint(0, 6)):
                self._turn()
        for _ in range(120):
            self._turn()
            if self.faulty and self.random.random() < 0.02:
                self._submit()
        self.faulty = False
        while self.now < 700:
            self._turn()
        self._check_end()

    def _submit(self) -> None:
        name = f"r{self.num_submitted}"
        self.num_submitted += 1
        prompt = np.zeros(self.random.randint(1, 5 * BLOCK), np.int32)
        peer = PeerRef("p", self.source.epoch, "")
        submit = Submit(
            request_id=name, attempt=0, mode="decode", prompt_token_ids=prompt.tobytes(), sampling=SamplingParams(),
            peer=peer, deadline_s=DEADLINE_S,
        )  # fmt: skip
        request = made_request(name, prompt, mode="prefill")
        sides = ["source", "sink"]
        self.random.shuffle(sides)
        for side in sides:
            self.due[side].add(name)
            if side == "source":
                sink = PeerRef("d", self.sink.epoch, "")
                self.source.manager.expect(AttemptKey(name, 0), sink, len(prompt), self.now + DEADLINE_S)
                self.source.waiting.append(request)
            else:
                self.sink.manager.expect(submit, made_request(name, prompt), self.now)
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
        elif dice < 0.035:
            self._cut_link()
        elif dice < 0.06 and self.due["sink"] | self.due["source"]:
            name = self.random.choice(sorted(self.due["sink"] | self.due["source"]))
            self.cancelled.add(name)
            self.source.manager.cancel(AttemptKey(name, 0), self.now)
            self.source.drop((name, 0))
            self.sink.manager.cancel(AttemptKey(name, 0), self.now)

    def _cut_link(self) -> None:
        """Until the sink has lost the source, neither hears a word; the source has lost the sink by then, or hears that
        it was forgotten when the link is back. Then they meet again, both the same lives."""
        if self.is_cut:
            return
        self.is_cut = True
        source, sink = self.source, self.sink

        is_forgotten = self.random.random() < 0.5
        if not is_forgotten:
            when = self.now + self.random.uniform(4.0, 7.0)
            self.lost_at.append((when, lambda: source.manager.peers.lost(NodeKey("d", sink.epoch))))

        def greet_again() -> None:
            if (source, sink) == (self.source, self.sink):
                if is_forgotten:
                    source.manager.peers.forgot(NodeKey("d", sink.epoch), self.now)
                self._meet()

        for delay, happening in (
            (5.0, lambda: sink.manager.peers.lost(NodeKey("p", source.epoch))),
            (self.random.uniform(7.0, 12.0), greet_again),
        ):
            self.lost_at.append((self.now + delay, happening))

    def _crash_source(self) -> None:
        old = self.source
        for sink, effect in self.unfenced:
            self._fence(sink, effect)
        self.unfenced = []
        self.ghosts.append(old)
        self.due["source"].clear()
        self.lives += 1
        self.source = Prefill(2 * self.lives + 1, old.pool.num_blocks)
        sink = self.sink
        self.lost_at.append((self.now + 5.0, lambda: sink.manager.peers.lost(NodeKey("p", old.epoch))))
        self._meet()

    def _crash_sink(self) -> None:
        old, source = self.sink, self.source
        self.due["sink"].clear()
        self.lives += 1
        self.sink = Decode(2 * self.lives, old.pool.num_blocks, self.sink_block)
        self.lost_at.append((self.now + 5.0, lambda: source.manager.peers.lost(NodeKey("d", old.epoch))))
        self._meet()

    def _deliver(self, entry: tuple[float, str, str, Any]) -> None:
        _, sender, to, message = entry
        both = {NodeKey(node.info.node_id, node.epoch) for node in (self.source, self.sink)}
        if self.is_cut and {sender, to} == both:
            return
        for node in (self.source, self.sink):
            if to == NodeKey(node.info.node_id, node.epoch):
                node.manager.on_message(sender, message, self.now)
                self._drain()

    def _drain(self) -> None:
        ends: list[Any] = []
        for node in (self.source, self.sink):
            me = NodeKey(node.info.node_id, node.epoch)
            for effect in node.manager.drain_effects():
                if isinstance(effect, Send):
                    self._post(me, effect.to, effect.message)
                elif isinstance(effect, TransferJob):
                    node.jobs.append(effect)
                elif isinstance(effect, FenceSource) and effect.node.epoch == self.source.epoch:
                    self.unfenced.append((self.sink, effect))
                elif isinstance(effect, FenceSource):
                    self._fence(self.sink, effect)
                elif isinstance(effect, SourceOutcome | SinkOutcome):
                    ends.append(effect)
        for ended in ends:
            self._take_outcome(ended)
        for node in (self.source, self.sink):
            node.manager.check_integrity()
            node.pool.check_integrity()
        self.sink.check_order()

    def _post(self, me: str, to: str, message: Any) -> None:
        copies = self.random.choice((0, 1, 1, 1, 2)) if self.faulty else 1
        for _ in range(copies):
            delay = self.random.choice((0.0, 0.1, 0.5, 3.0)) if self.faulty else 0.0
            self.messages.append((self.now + delay, me, to, message))

    def _fence(self, sink: Decode, effect: FenceSource) -> None:
        def fenced() -> None:
            self.ghosts = [ghost for ghost in self.ghosts if ghost.epoch != effect.node.epoch]
            sink.manager.on_transfer_event(Fenced(effect.node), self.now)

        self.lost_at.append((self.now + 1.0, fenced))

    def _take_outcome(self, ended: Any) -> None:
        if isinstance(ended, SourceOutcome):
            self.ends["source", ended.key[0]] += 1
            self.source.drop(ended.key)
            return
        self.ends["sink", ended.request.key.request_id] += 1
        if isinstance(ended, Commit):
            whole = [self.sink.bytes.get(block, (0, False))[1] for block in ended.block_ids]
            assert all(whole), "committed a block that was not wholly written"
            self.sink.pool.free(list(ended.block_ids), None)

    # --- the transfer threads -------------------------------------------------------------------------------

    def _transfer(self) -> None:
        if self.faulty and self.random.random() < 0.05:
            self.stalls_until = self.now + self.random.uniform(0.0, 4.0)
        sources = (self.source, *self.ghosts) if self.now >= self.stalls_until else ()
        for node in sources:
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
            if node is self.source:
                self.sink.check_origin(node, job)
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
        self._post(NodeKey("p", node.epoch), NodeKey("d", grant.sink_epoch), ready)
        return ReadySent(job.key, grant.grant_id, ready)

    # --- the end --------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        for side, names in self.due.items():
            for name in names:
                count = self.ends[side, name]
                assert count == 1 or (count == 0 and name in self.cancelled), f"{side} of {name} ended {count} times"
        for node in (self.source, self.sink):
            assert node.pool.num_free == node.pool.num_blocks, f"{node.info.node_id} leaks blocks"
            assert not node.manager.ledger.records, f"{node.info.node_id} keeps records"
        assert self.sink.manager.ledger.num_quarantined == 0
