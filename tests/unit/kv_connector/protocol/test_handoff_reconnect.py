"""A connection that was silent for longer than `peer_lost_s` while both processes lived, and came back."""

from __future__ import annotations

import pytest

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVDrained, KVGrant, KVRefused
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import Failed, HandoffCompleted, HandoffFailed
from tandem.kv_connector.protocol.peer_effects import PeerFailed
from tandem.kv_connector.protocol.sink_table import SinkState
from tandem.kv_connector.protocol.source_table import SourceState
from tests.fakes.handoff_duo import SINK, SOURCE, Duo, ready_of


def granted(duo: Duo, name: str) -> None:
    """Up to the computed prompt, with its pushes queued: its grant may be written under."""
    duo.submit(name)
    duo.schedule()
    duo.schedule()
    duo.compute()
    assert duo.sink.manager.ledger.records[name, 0].machine.state is SinkState.GRANTED


def cut(duo: Duo) -> None:
    duo.is_cut = True
    duo.tick(6.0)
    duo.lose_each_other()


def test_new_hand_offs_work_although_the_old_fence_has_not_ended() -> None:
    """So it is over shared memory: that fence ends with the source's process."""
    duo = Duo()
    granted(duo, "old")
    jobs = list(duo.source.jobs)
    cut(duo)
    assert duo.sink.manager.ledger.num_quarantined == 2
    duo.meet()
    granted(duo, "new")
    for job in jobs[:-1]:
        duo.sink.land(job.grant, job.destination_block_ids, True)  # finds its blocks in quarantine, or fails
    duo.transfer()
    duo.verify()
    assert duo.committed == {"new"}
    for _ in range(10):
        duo.turn()
    assert duo.sink.manager.ledger.num_quarantined == 0, "the source has said that it writes no more"
    assert duo.ends == {(side, name): 1 for side in ("source", "sink") for name in ("old", "new")}
    duo.check_whole()


def test_old_grants_stay_refused() -> None:
    duo = Duo()
    granted(duo, "old")
    finalize = duo.source.jobs[-1]
    duo.submit("unheard")
    duo.lost = {KVGrant}
    duo.schedule()
    cut(duo)
    duo.lost = {KVDrained}
    duo.meet()
    sink, source = duo.sink.manager, duo.source.manager
    sink.on_message(SOURCE, ready_of(finalize), duo.now)
    assert sink.ledger.records["old", 0].machine.state is SinkState.QUARANTINED
    assert sink.ledger.num_quarantined == 4
    source.on_message(SINK, duo.grants["unheard"], duo.now)
    assert source.ledger.records["unheard", 0].machine.grant_id == 0
    assert source.ledger.records["unheard", 0].machine.state is SourceState.CLOSED
    duo.exchange()
    assert duo.committed == set()
    duo.lost = set()
    for _ in range(10):
        duo.turn()
    duo.check_whole()


def test_a_late_fence_frees_what_was_lost_and_leaves_what_was_granted_since() -> None:
    duo = Duo()
    granted(duo, "old")
    cut(duo)
    duo.lost = {KVDrained}
    duo.meet()
    granted(duo, "new")
    duo.fence_ends()
    records = duo.sink.manager.ledger.records
    assert records["old", 0].machine.state is SinkState.CLOSED
    assert records["new", 0].machine.state is SinkState.GRANTED
    duo.transfer()
    duo.verify()
    assert duo.committed == {"new"}
    duo.transfer()
    duo.check_whole()


def test_of_a_source_that_was_lost_twice_the_last_fence_counts() -> None:
    duo = Duo()
    granted(duo, "first")
    cut(duo)
    duo.lost = {KVDrained}
    duo.meet()
    granted(duo, "second")
    cut(duo)
    duo.fence_ends()
    assert duo.sink.manager.ledger.num_quarantined == 4, "the first fence knows nothing of the second grant"
    duo.fence_ends()
    assert duo.sink.manager.ledger.num_quarantined == 0
    duo.transfer()
    duo.check_whole()


def test_a_ticket_waits_until_its_lost_source_greets_again() -> None:
    """A source connects when it gets its half of a request, which may be later than the sink gets the other."""
    duo = Duo()
    cut(duo)
    duo.submit("r")
    duo.tick(1.0)
    assert not duo.ends
    duo.meet()
    duo.tick(Timeouts().connect_s)
    for _ in range(5):
        duo.turn()
    assert duo.committed == {"r"}
    duo.check_whole()


def test_a_ticket_of_a_source_that_stays_away_fails_before_its_deadline() -> None:
    duo = Duo()
    cut(duo)
    duo.submit_to_sink("r")
    duo.tick(Timeouts().connect_s)
    (failed,) = duo.outcomes
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.retryable) == (outcomes.SOURCE_LOST, True)


def test_a_channel_that_was_barred_while_a_fence_held_is_opened_by_the_next_grant() -> None:
    """The source may dial before the sink's step loop has lifted the bar."""
    duo = Duo()
    cut(duo)
    duo.meet()
    duo.submit("r")
    duo.exchange()
    opened = duo.num_channels_opened
    duo.source.manager.on_transfer_event(PeerFailed(NodeKey("d", 2), "fenced"), duo.now)
    duo.schedule()
    assert "r" in duo.grants
    assert duo.num_channels_opened == opened + 1


def test_a_source_that_was_not_told_hears_how_its_hand_offs_ended() -> None:
    """Only the sink has lost its peer; what is recomputed there must not be reported as failed here."""
    duo = Duo()
    granted(duo, "r")
    duo.transfer()
    duo.verify(matches=False)
    duo.lost = {KVDrained}
    duo.sink.manager.peers.lost(NodeKey("p", 1))
    assert duo.sink.manager.counters.recomputes == 1
    duo.meet()
    duo.tick(1.0)
    assert duo.ends == {("source", "r"): 1, ("sink", "r"): 1}
    assert not [each for each in duo.outcomes if isinstance(each, Failed | HandoffFailed)]


def test_a_later_loss_does_not_change_why_a_hand_off_ended() -> None:
    duo = Duo()
    granted(duo, "r")
    duo.lost = {KVRefused}
    for _ in range(3):
        duo.transfer()
        duo.verify(matches=False)
    duo.sink.manager.peers.lost(NodeKey("p", 1))
    duo.sink.manager.cancel(AttemptKey("r", 0), duo.now)
    duo.lost = set()
    duo.meet()
    duo.tick(1.0)
    assert duo.outcomes[-1] == HandoffCompleted(("r", 0), outcomes.RECOMPUTING)
    duo.transfer()
    duo.check_whole()


def test_a_claim_of_a_lost_source_is_not_heard_before_its_greeting() -> None:
    """It would get a grant that no fence covers: those asked for are of before."""
    duo = Duo()
    duo.submit_to_sink("r")
    duo.is_cut = True
    duo.submit_to_source("r")
    duo.schedule()
    duo.sink.manager.peers.lost(NodeKey("p", 1))
    duo.is_cut = False
    duo.submit_to_sink("s")
    duo.submit_to_source("s")
    duo.schedule()
    assert not duo.grants
    assert duo.sink.manager.counters.foreign_messages == 1
    duo.meet()
    for _ in range(5):
        duo.turn()
    assert duo.committed == {"s"}
    assert duo.ends["source", "r"] == 1, "its late claim was refused"
    duo.check_whole()


@pytest.mark.parametrize("begun", ["waiting", "claimed", "parked", "computed"])
def test_what_a_sink_that_forgot_its_source_never_granted_goes_on(begun: str) -> None:
    """The source was silent for too long; a ticket came to the sink since, and the source's claims are not heard."""
    duo = Duo()
    duo.is_cut = True
    duo.sink.manager.peers.lost(NodeKey("p", 1))
    duo.submit_to_sink("r")
    duo.submit_to_source("r")
    if begun == "claimed":
        duo.source.manager.prompts._max_parked = 0
    if begun != "waiting":
        duo.schedule()
    if begun == "computed":
        duo.compute()
    duo.is_cut = False
    (again,) = duo.source.manager.peers.forgot(NodeKey("d", 2), duo.now)
    assert (again.node_id, again.epoch) == ("d", 2)
    duo.source.manager.prompts._max_parked = 64
    duo.meet()
    for _ in range(5):
        duo.turn()
    assert duo.committed == {"r"}
    assert not [each for each in duo.outcomes if isinstance(each, Failed | HandoffFailed)]
    duo.check_whole()


def test_what_a_sink_that_forgot_its_source_has_granted_ends() -> None:
    duo = Duo()
    granted(duo, "r")
    duo.sink.manager.peers.lost(NodeKey("p", 1))
    assert duo.source.manager.peers.forgot(NodeKey("d", 2), duo.now) == []
    duo.meet()
    duo.tick(1.0)
    duo.transfer()
    duo.tick(10.0)
    assert duo.ends == {("source", "r"): 1, ("sink", "r"): 1}
    duo.check_whole()
