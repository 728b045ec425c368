"""Every state × every event of both hand-off tables has exactly one rule, and the machines drop what is stale."""

from __future__ import annotations

import itertools

import pytest

from tandem.kv_connector.protocol import sink_table, source_table
from tandem.kv_connector.protocol.sink_table import SinkAction, SinkEvent, SinkMachine, SinkState
from tandem.kv_connector.protocol.source_table import SourceAction, SourceEvent, SourceMachine, SourceState

SOURCE_EPOCH, SINK_EPOCH, GRANT = 11, 22, 33


@pytest.mark.parametrize("module", [source_table, sink_table])
def test_each_pair_has_exactly_one_rule(module):
    states = SourceState if module is source_table else SinkState
    events = SourceEvent if module is source_table else SinkEvent
    for state, event in itertools.product(states, events):
        has_row = (state, event) in module._ROWS
        ignored = event in module._IGNORED[state]
        assert has_row != ignored, f"{state} x {event}: {'two rules' if has_row else 'no rule'}"
        result = module.transition(state, event)
        assert (result is None) == ignored


@pytest.mark.parametrize("state", SourceState)
@pytest.mark.parametrize("event", SourceEvent)
def test_source_machine_survives_every_event_in_every_state(state, event):
    machine = SourceMachine(SOURCE_EPOCH, SINK_EPOCH)
    machine.state = state
    actions = machine.on(event)
    assert machine.num_dropped == (0 if (state, event) in source_table._ROWS else 1)
    ends = [action for action in actions if action.name.startswith("END_")]
    assert len(ends) <= 1
    if SourceAction.FREE in actions and state not in (SourceState.DRAINING, SourceState.RETIRING):
        assert state in (SourceState.IDLE, SourceState.CLAIMING, SourceState.PARKED, SourceState.PARKED_DONE), (
            "once a grant is held, blocks are freed only after Retired"
        )


GRANT_HELD = (SinkState.GRANTED, SinkState.VERIFYING, SinkState.RESENDING, SinkState.QUARANTINED)


@pytest.mark.parametrize("state", SinkState)
@pytest.mark.parametrize("event", SinkEvent)
def test_sink_frees_granted_blocks_only_when_no_write_can_land(state, event):
    result = sink_table.transition(state, event)
    if result is None:
        return
    after, actions = result
    if SinkAction.FREE in actions:
        assert state in GRANT_HELD
        assert event in (SinkEvent.DRAINED, SinkEvent.FENCED)
    if SinkAction.COMMIT in actions:
        assert (state, event) == (SinkState.VERIFYING, SinkEvent.VERIFIED)
    if state in GRANT_HELD and after not in GRANT_HELD:
        assert SinkAction.FREE in actions or SinkAction.COMMIT in actions, "leaves its blocks to nobody"
    ends = [a for a in actions if a.name.startswith("END_") or a in (SinkAction.COMMIT, SinkAction.RECOMPUTE)]
    alive = (SinkState.EXPECTING, SinkState.QUEUED, *GRANT_HELD[:3])
    if state in alive and after not in alive:
        assert len(ends) == 1, "an end without a word to the router, or with two"
    elif state is not SinkState.REJECTED:
        assert not ends


def granted_source() -> SourceMachine:
    machine = SourceMachine(SOURCE_EPOCH, SINK_EPOCH)
    machine.on(SourceEvent.CLAIM)
    machine.on_grant(GRANT, SOURCE_EPOCH, SINK_EPOCH)
    assert machine.state is SourceState.PUSHING
    return machine


def test_source_takes_a_grant_once_and_only_its_own():
    machine = SourceMachine(SOURCE_EPOCH, SINK_EPOCH)
    assert machine.on_grant(GRANT, SOURCE_EPOCH, SINK_EPOCH) == ()
    assert machine.grant_id == 0, "a grant before the claim is nobody's"
    machine.on(SourceEvent.CLAIM)
    machine.on_grant(GRANT, SOURCE_EPOCH + 1, SINK_EPOCH)
    machine.on_grant(GRANT, SOURCE_EPOCH, SINK_EPOCH + 1)
    assert machine.state is SourceState.CLAIMING
    machine.on_grant(GRANT, SOURCE_EPOCH, SINK_EPOCH)
    machine.on_grant(GRANT + 1, SOURCE_EPOCH, SINK_EPOCH)
    assert machine.grant_id == GRANT
    assert machine.num_dropped == 4


def test_late_grant_after_cancel_is_dropped():
    machine = SourceMachine(SOURCE_EPOCH, SINK_EPOCH)
    machine.on(SourceEvent.CLAIM)
    actions = machine.on(SourceEvent.CANCEL)
    assert SourceAction.SEND_DRAINED in actions
    assert machine.on_grant(GRANT, SOURCE_EPOCH, SINK_EPOCH) == ()
    assert machine.grant_id == 0, "KVDrained says that no grant was ever held"


def test_source_answers_each_resend_round_once():
    machine = granted_source()
    machine.on(SourceEvent.COMPUTED)
    machine.on_sent(GRANT, 0)
    assert machine.on_resend(GRANT, 1) == (SourceAction.PUSH_AGAIN, SourceAction.FINALIZE)
    assert machine.on_resend(GRANT, 1) == ()
    assert machine.on_sent(GRANT, 0) == (), "the word about the first round comes late"
    assert machine.state is SourceState.FINALIZING
    machine.on_sent(GRANT, 1)
    assert machine.state is SourceState.READY


def granted_sink(max_resends: int = 2) -> SinkMachine:
    machine = SinkMachine(SINK_EPOCH, max_resends)
    machine.on_submit(SOURCE_EPOCH)
    machine.on_claim(SOURCE_EPOCH, SINK_EPOCH)
    machine.on_can_grant(GRANT)
    return machine


def test_sink_drops_ready_of_another_grant_epoch_or_round():
    machine = granted_sink()
    machine.on_ready(GRANT + 1, SOURCE_EPOCH, SINK_EPOCH, 0)
    machine.on_ready(GRANT, SOURCE_EPOCH + 1, SINK_EPOCH, 0)
    machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH + 1, 0)
    machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH, 1)
    assert machine.state is SinkState.GRANTED
    assert machine.num_dropped == 4
    assert machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH, 0) == (SinkAction.VERIFY,)


def test_mismatch_asks_again_then_recomputes_with_the_blocks_in_quarantine():
    machine = granted_sink(max_resends=2)
    for round in range(2):
        machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH, round)
        assert machine.on_verified(GRANT, round, False) == (SinkAction.SEND_RESEND,)
        assert machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH, round) == (), "late duplicate of the round before"
    machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH, 2)
    actions = machine.on_verified(GRANT, 2, False)
    assert SinkAction.RECOMPUTE in actions
    assert SinkAction.FREE not in actions
    assert machine.state is SinkState.QUARANTINED
    assert machine.on_drained(SOURCE_EPOCH, GRANT) == (SinkAction.FREE, SinkAction.SEND_ACK)


def test_fence_during_verification_is_remembered():
    machine = granted_sink()
    machine.on_ready(GRANT, SOURCE_EPOCH, SINK_EPOCH, 0)
    machine.on_source_lost(SOURCE_EPOCH)
    machine.on_fenced(SOURCE_EPOCH)
    assert machine.state is SinkState.VERIFYING
    actions = machine.on_verified(GRANT, 0, False)
    assert {SinkAction.RECOMPUTE, SinkAction.FREE} <= set(actions)
    assert machine.state is SinkState.CLOSED


def test_early_claim_of_another_source_life_is_forgotten():
    machine = SinkMachine(SINK_EPOCH)
    machine.on_claim(SOURCE_EPOCH, SINK_EPOCH)
    assert machine.state is SinkState.EARLY
    machine.on_submit(SOURCE_EPOCH + 1)
    assert machine.state is SinkState.EXPECTING
    machine.on_claim(SOURCE_EPOCH, SINK_EPOCH)
    assert machine.state is SinkState.EXPECTING


def test_drained_of_another_grant_frees_nothing():
    machine = granted_sink()
    machine.on(SinkEvent.LEASE)
    assert machine.state is SinkState.QUARANTINED
    assert machine.on_drained(SOURCE_EPOCH, GRANT + 1) == ()
    assert machine.on_drained(SOURCE_EPOCH + 1, GRANT) == ()
    assert machine.on_fenced(SOURCE_EPOCH + 1) == ()
    assert machine.state is SinkState.QUARANTINED
