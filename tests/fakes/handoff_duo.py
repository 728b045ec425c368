"""Both hand-off managers with real pools, led step by step: no chance, no fault but what a test asks for."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import (
    Finalize,
    ReadySent,
    Retire,
    Retired,
    TransferJob,
    TransportCommand,
    Verified,
)
from tandem.kv_connector.protocol.outcomes import Commit, SourceOutcome
from tandem.kv_connector.protocol.peer_effects import Fenced, FenceSource, OpenChannel, PeerEffect
from tests.fakes.handoff_nodes import BLOCK, Decode, Prefill
from tests.fakes.made_requests import made_request

DEADLINE_S = 30.0  # shorter than a grant's lease
SOURCE, SINK = NodeKey("p", 1), NodeKey("d", 2)


class Duo:
    """`lost`: kinds of messages that don't arrive; `is_cut`: none does. Fences end when `fence_ends` is called."""

    def __init__(self, source_blocks: int = 8, sink_blocks: int = 8) -> None:
        self.now = 1.0
        self.source, self.sink = Prefill(1, source_blocks), Decode(2, sink_blocks)
        self.lost: set[type] = set()
        self.is_cut = False
        self.ends: Counter[tuple[str, str]] = Counter()
        self.outcomes: list[Any] = []
        self.grants: dict[str, KVGrant] = {}
        self.effects: list[Any] = []
        self.meet()

    def meet(self) -> None:
        self.is_cut = False
        self.source.manager.peers.connected(self.sink.info)
        self.sink.manager.peers.connected(self.source.info)
        self.exchange()

    def lose_each_other(self) -> None:
        """As both control planes do after `peer_lost_s` of silence."""
        self.is_cut = True
        self.sink.manager.peers.lost(NodeKey("p", 1))
        self.source.manager.peers.lost(NodeKey("d", 2))
        self.exchange()

    def fence_ends(self) -> None:
        """The fence that was asked for first."""
        fence = next(effect for effect in self.effects if isinstance(effect, FenceSource))
        self.effects.remove(fence)
        self.sink.manager.on_transfer_event(Fenced(fence.node), self.now)
        self.exchange()

    @property
    def num_channels_opened(self) -> int:
        return sum(isinstance(effect, OpenChannel) for effect in self.effects)

    # --- requests -------------------------------------------------------------------------------------------

    def submit(self, name: str, num_blocks: int = 2) -> None:
        self.submit_to_sink(name, num_blocks)
        self.submit_to_source(name, num_blocks)

    def submit_to_source(self, name: str, num_blocks: int = 2) -> None:
        prompt = np.zeros(num_blocks * BLOCK, np.int32)
        self.source.manager.expect(AttemptKey(name, 0), PeerRef("d", 2, ""), len(prompt), self.now + DEADLINE_S)
        self.source.waiting.append(made_request(name, prompt, mode="prefill"))

    def submit_to_sink(self, name: str, num_blocks: int = 2) -> None:
        prompt = np.zeros(num_blocks * BLOCK, np.int32)
        submit = Submit(
            request_id=name, attempt=0, mode="decode", prompt_token_ids=prompt.tobytes(), sampling=SamplingParams(),
            peer=PeerRef("p", 1, ""), deadline_s=DEADLINE_S,
        )  # fmt: skip
        self.sink.manager.expect(submit, made_request(name, prompt), self.now)
        self.exchange()

    def cancel(self, name: str) -> None:
        """The router's, on both sides; it is the request's end there."""
        for side in ("source", "sink"):
            self.ends[side, name] += 1
        self.source.manager.cancel(AttemptKey(name, 0), self.now)
        self.source.drop((name, 0))
        self.sink.manager.cancel(AttemptKey(name, 0), self.now)
        self.exchange()

    # --- time and messages ----------------------------------------------------------------------------------

    def turn(self, seconds: float = 0.6) -> None:
        """Everything that can go on does."""
        self.tick(seconds)
        self.schedule()
        self.compute()
        self.transfer()
        self.verify()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.source.manager.on_tick(self.now)
        self.sink.manager.on_tick(self.now)
        self.exchange()

    def schedule(self) -> None:
        self.source.step()
        self.exchange()

    def compute(self) -> None:
        for request in list(self.source.running):
            self.source.compute(request)
        self.exchange()

    def exchange(self) -> None:
        """Messages and outcomes until nothing moves."""
        moved = True
        while moved:
            moved, ends = False, []
            for node, me, other in ((self.source, SOURCE, self.sink), (self.sink, SINK, self.source)):
                for effect in node.manager.drain_effects():
                    if isinstance(effect, Send):
                        self._deliver(me, other, effect.message)
                        moved = True
                    elif isinstance(effect, TransferJob):
                        self._submit_job(node, effect)
                    elif isinstance(effect, PeerEffect):
                        self.effects.append(effect)
                    elif not isinstance(effect, TransportCommand):
                        ends.append(effect)
            for ended in ends:
                self._take_outcome(ended)
        for node in (self.source, self.sink):
            node.manager.check_integrity()
            node.pool.check_integrity()

    def _submit_job(self, node: Any, job: Any) -> None:
        """A grant ends when its Retire is submitted: the transfer thread drops what is queued before it."""
        node.jobs.append(job)
        if isinstance(job, Retire):
            node.retired.add(job.grant_id)

    def _deliver(self, sender: str, to: Any, message: Any) -> None:
        if isinstance(message, KVGrant):
            self.grants[message.request_id] = message
        if not self.is_cut and type(message) not in self.lost:
            to.manager.on_message(sender, message, self.now)

    def _take_outcome(self, ended: Any) -> None:
        self.outcomes.append(ended)
        if isinstance(ended, SourceOutcome):
            self.ends["source", ended.key[0]] += 1
            self.source.drop(ended.key)
            return
        self.ends["sink", ended.request.key.request_id] += 1
        if isinstance(ended, Commit):
            assert all(self.sink.bytes[block][1] for block in ended.block_ids)
            self.sink.pool.free(list(ended.block_ids), None)

    @property
    def committed(self) -> set[str]:
        return {each.request.key.request_id for each in self.outcomes if isinstance(each, Commit)}

    # --- transfer threads -----------------------------------------------------------------------------------

    def transfer(self) -> None:
        while self.source.jobs:
            job = self.source.jobs.popleft()
            if isinstance(job, Retire):
                self.source.manager.on_transfer_event(Retired(job.key, job.grant_id), self.now)
            elif job.grant_id in self.source.retired:
                continue
            elif isinstance(job, Finalize):
                ready = ready_of(job)
                self._deliver(SOURCE, self.sink, ready)
                self.source.manager.on_transfer_event(ReadySent(job.key, job.grant_id, ready), self.now)
            else:
                self.sink.land(job.grant, job.destination_block_ids, True)
            self.exchange()

    def verify(self, matches: bool = True) -> None:
        while self.sink.jobs:
            job = self.sink.jobs.popleft()
            bad = () if matches else (0,)
            self.sink.manager.on_transfer_event(Verified(job.key, job.grant_id, job.round, bad), self.now)
            self.exchange()

    # --- the end --------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        for node in (self.source, self.sink):
            assert node.pool.num_free == node.pool.num_blocks, f"{node.info.node_id} leaks blocks"
            assert node.pool.reservations.is_empty, f"{node.info.node_id} leaks holds"


def ready_of(job: Finalize) -> KVReady:
    grant = job.grant
    return KVReady(
        request_id=grant.request_id, attempt=0, grant_id=grant.grant_id, grant_signature=grant.signature,
        source_id="p", source_epoch=1, sink_epoch=2, first_tokens=job.first_tokens,
        digests=b"d" * 8 * len(grant.block_ids), round=job.round,
    )  # fmt: skip
