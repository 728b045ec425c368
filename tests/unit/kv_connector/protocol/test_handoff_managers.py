"""The real managers over a network that loses, doubles, delays and reorders, with crashes, cancels and bad bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVDrained, KVGrant, KVReady, KVRefused
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.kv_connector.protocol.sink_table import SinkState
from tandem.kv_connector.protocol.source_table import SourceAction
from tandem.kv_connector.sink import ledger as sink_ledger
from tandem.kv_connector.sink.line import SinkLine
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.sink.peers import SinkPeers
from tandem.kv_connector.source.actions import SourceActions
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.record import SourceRecord
from tests.fakes.handoff_effects import take_messages
from tests.fakes.handoff_network import World
from tests.fakes.handoff_nodes import BLOCK, Prefill
from tests.fakes.made_requests import made_request

# The explorer visits these managers breadth-first; here are longer histories than its bounds allow.
QUICK = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.integers(0, 2**32))
def test_every_hand_off_ends_once_and_leaves_nothing(seed: int) -> None:
    World(seed).run()


@pytest.mark.slow
def test_campaign() -> None:
    run_worlds(5000)


def free_in_quarantine(patch: pytest.MonkeyPatch) -> None:
    tick = SinkManager._tick

    def hasty(self, record):
        tick(self, record)
        if record.machine.state is SinkState.QUARANTINED and record.granted:
            self.ledger.free_granted(record)

    patch.setattr(SinkManager, "_tick", hasty)


def last_claim_first(patch: pytest.MonkeyPatch) -> None:
    settle = SinkLine.settle

    def unfair(self, record):
        if self._queue:
            self._queue.insert(0, self._queue.pop())
        settle(self, record)

    patch.setattr(SinkLine, "settle", unfair)


def fences_unheard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SinkPeers, "fenced", lambda self, source: None)


def digests_ignored(patch: pytest.MonkeyPatch) -> None:
    on_verified = SinkManager._on_verified
    patch.setattr(
        SinkManager,
        "_on_verified",
        lambda self, record, event: on_verified(self, record, replace(event, bad_indices=())),
    )


def tombstones_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sink_ledger, "TOMBSTONE_S", math.inf)


def source_blocks_leak(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SourceLedger, "free", lambda self, record: setattr(record, "owns_blocks", False))


def drained_before_retired(patch: pytest.MonkeyPatch) -> None:
    queue_job = SourceActions._queue_job

    def hasty(self, record, action):
        queue_job(self, record, action)
        if action is SourceAction.RETIRE:
            self.run(record, record.machine.on_retired(record.machine.grant_id))

    patch.setattr(SourceActions, "_queue_job", hasty)


def blocks_of_one_size(patch: pytest.MonkeyPatch) -> None:
    origins = SourceRecord._origins
    patch.setattr(SourceRecord, "_origins", lambda self, blocks: (origins(self, blocks)[0], (0,) * len(blocks)))


MUTATIONS = [
    (free_in_quarantine, "no longer holds"),
    (last_claim_first, "changed their order"),
    (fences_unheard, "leaks blocks"),
    (digests_ignored, "not wholly written"),
    (tombstones_stay, "keeps records"),
    (source_blocks_leak, "leaks blocks"),
    (drained_before_retired, "no longer holds|reads a block that was freed"),
    (blocks_of_one_size, "more source blocks|another's place"),
]


def run_worlds(num_seeds: int) -> None:
    for seed in range(num_seeds):
        World(seed).run()


@pytest.mark.parametrize(("mutate", "finding"), MUTATIONS, ids=[mutate.__name__ for mutate, _ in MUTATIONS])
def test_a_broken_manager_is_found(mutate, finding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(AssertionError, match=finding):
        run_worlds(60)


def test_the_same_worlds_pass_when_nothing_is_broken() -> None:
    run_worlds(60)


def test_a_message_of_another_epoch_or_an_unknown_hand_off_leaves_no_record() -> None:
    world = World(0)
    sink, source = world.sink.manager, world.source.manager
    drained = KVDrained(request_id="x", attempt=0, source_epoch=5, grant_id=0)
    sink.on_message(NodeKey("p", 6), drained, 1.0)
    assert (sink.counters.foreign_messages, len(sink.ledger.records)) == (1, 0)
    ready = KVReady(
        request_id="y", attempt=0, grant_id=3, grant_signature=b"", source_id="p", source_epoch=1, sink_epoch=2,
        first_tokens=(), digests=b"",
    )  # fmt: skip
    sink.on_message(NodeKey("p", 1), ready, 1.0)
    assert [type(sent) for _, sent in take_messages(sink)] == [KVRefused]
    sink.on_tick(100.0)
    assert not sink.ledger.records, "a stray KVReady must not leave a record for ever"
    source.on_message(NodeKey("d", 2), KVRefused(request_id="x", attempt=0, reason=""), 1.0)
    assert source.counters.messages_dropped == 1
    assert [type(sent) for _, sent in take_messages(source)] == [KVDrained]


def test_without_faults_the_two_pools_never_wait_for_each_other() -> None:
    """Small pools, prompts up to their size: only a deadlock could keep one from its commit."""
    for seed in range(40):
        world = World(seed)
        world.faulty = False
        world.run()
        assert world.sink.manager.counters.commits == len(world.due["sink"])


def test_parked_kv_keeps_to_its_share_and_leaves_room_for_earlier_claims() -> None:
    source = Prefill(1, 8)
    manager = source.manager
    manager.peers.connected(NodeInfo(node_id="d", epoch=2, role="decode"))

    def starts(name: str, num_blocks: int) -> bool:
        prompt = np.zeros(num_blocks * BLOCK, np.int32)
        manager.expect(AttemptKey(name, 0), PeerRef("d", 2, ""), len(prompt), 100.0)
        request = made_request(name, prompt, mode="prefill")
        if manager.prompts.get_num_new_matched_tokens(request, 0) is None:
            return False
        blocks = source.pool.allocate(num_blocks)
        assert blocks is not None
        manager.prompts.update_state_after_alloc(request, blocks, 0)
        return True

    share = manager.prompts._max_parked
    assert 2 <= share < 7
    assert not starts("larger than the share", share + 1)
    room = min(share, 8 - (share + 1))
    assert not starts("would take the room of the earlier claim", room + 1)
    assert starts("fits beside it", room - 1) if room > 1 else starts("fits beside it", room)
    assert not starts("the parked ones count together", room)


def test_a_forged_grant_is_refused_and_counted() -> None:
    world = World(0)
    world.faulty = False
    manager = world.source.manager
    manager.expect(AttemptKey("r", 0), PeerRef("d", 2, ""), 4, 100.0)
    request = made_request("r", np.zeros(4, np.int32), mode="prefill")
    manager.prompts.get_num_new_matched_tokens(request, 0)
    forged = KVGrant(
        request_id="r", attempt=0, grant_id=1, source_id="p", source_epoch=1, sink_id="d", sink_epoch=2,
        first_block=0, block_ids=(0,), num_prompt_tokens=4, lease_s=1.0, signature=b"x" * 16,
    )  # fmt: skip
    manager.on_message(NodeKey("d", 2), forged, 1.0)
    assert manager.counters.grants_refused == 1
    assert manager.ledger.records["r", 0].machine.grant_id == 0
