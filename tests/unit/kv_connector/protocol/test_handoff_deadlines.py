"""Every state of both tables either ends its request at a deadline, or is named here with what it waits for instead.

Each test brings one side into a state by the real managers, then nothing is heard any more and time passes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady, KVResend
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import HandoffFailed
from tandem.kv_connector.protocol.sink_table import SinkState as K
from tandem.kv_connector.protocol.source_table import SourceState as P
from tandem.kv_connector.sink import ledger as sink_ledger
from tandem.kv_connector.sink import record
from tandem.kv_connector.source import manager as source
from tests.fakes.handoff_duo import DEADLINE_S, SOURCE, Duo, ready_of

KEY = AttemptKey("r", 0)
START_S = 1.0  # Duo's clock when the request is submitted


def cancel_source(duo: Duo) -> None:
    duo.ends["source", "r"] += 1  # a cancel is the router's own end of it
    duo.source.manager.cancel(KEY, duo.now)
    duo.source.drop(KEY)
    duo.exchange()


def cancel_sink(duo: Duo) -> None:
    duo.ends["sink", "r"] += 1
    duo.sink.manager.cancel(KEY, duo.now)
    duo.exchange()


def idle(duo: Duo) -> None:
    duo.submit_to_source("r")


def claiming(duo: Duo) -> None:
    duo.is_cut = True
    duo.source.manager.prompts._max_parked = 0
    idle(duo)
    duo.schedule()


def parked(duo: Duo) -> None:
    duo.is_cut = True
    idle(duo)
    duo.schedule()


def parked_done(duo: Duo) -> None:
    parked(duo)
    duo.compute()


def pushing(duo: Duo) -> None:
    duo.submit("r")
    duo.schedule()
    duo.schedule()


def finalizing(duo: Duo) -> None:
    pushing(duo)
    duo.compute()


def ready(duo: Duo) -> None:
    finalizing(duo)
    duo.lost = {KVReady}
    duo.transfer()


def draining(duo: Duo) -> None:
    finalizing(duo)
    duo.is_cut = True
    cancel_source(duo)


def drained(duo: Duo) -> None:
    claiming(duo)
    cancel_source(duo)


def retiring(duo: Duo) -> None:
    finalizing(duo)
    duo.source.manager.peers.lost(NodeKey("d", 2))
    duo.exchange()


def closed(duo: Duo) -> None:
    idle(duo)
    duo.source.manager.peers.lost(NodeKey("d", 2))
    duo.exchange()


SOURCE_STATES: dict[P, Callable[[Duo], None]] = {
    P.IDLE: idle,
    P.CLAIMING: claiming,
    P.PARKED: parked,
    P.PARKED_DONE: parked_done,
    P.PUSHING: pushing,
    P.FINALIZING: finalizing,
    P.READY: ready,
    P.DRAINING: draining,
    P.DRAINED: drained,
    P.RETIRING: retiring,
    P.CLOSED: closed,
}
# The request has ended. Blocks wait for the transfer thread of the same process, which answers every Retire: its own
# waits are bounded, and if it hung, no deadline could tell that it reads them no more.
AWAIT_TRANSFER_THREAD = {P.DRAINING, P.RETIRING}
SOURCE_ENDED = {P.DRAINED, P.CLOSED} | AWAIT_TRANSFER_THREAD


def test_the_states_of_the_source_without_a_deadline_are_those_named_here() -> None:
    assert set(SOURCE_STATES) == set(P)
    assert set(source._BEING_RETIRED) == AWAIT_TRANSFER_THREAD


@pytest.mark.parametrize("state", P)
def test_the_deadline_ends_each_state_of_a_source(state: P) -> None:
    duo = Duo()
    SOURCE_STATES[state](duo)
    duo.is_cut = True
    manager = duo.source.manager
    machine = manager.ledger.records[KEY].machine
    assert machine.state is state
    ended = state in SOURCE_ENDED
    duo.tick(START_S + DEADLINE_S - duo.now - 0.1)
    assert duo.ends["source", "r"] == ended
    assert machine.state is state
    duo.tick(0.1)
    assert duo.ends["source", "r"] == 1
    if not ended:
        (failed,) = [each for each in duo.outcomes if isinstance(each, HandoffFailed)]
        assert (failed.reason, failed.retryable) == (outcomes.DEADLINE, False)
    if state in AWAIT_TRANSFER_THREAD:
        assert machine.state is state
        assert duo.source.pool.num_free == duo.source.pool.num_blocks - 2, "they may still be read"
        assert manager.counters.retires_overdue == 1
    duo.transfer()
    duo.tick(0.1)
    assert duo.source.pool.num_free == duo.source.pool.num_blocks
    assert manager.ledger.is_idle
    duo.tick(source.TOMBSTONE_S + 1.0)
    duo.tick(source.TOMBSTONE_S + 1.0)  # a DRAINED that was never acknowledged closes first
    assert not manager.ledger.records
    assert duo.ends["source", "r"] == 1


def unknown(duo: Duo) -> None:
    """A KVReady of a hand-off that this sink has never heard of."""
    other = Duo()
    finalizing(other)
    duo.is_cut = True
    duo.sink.manager.on_message(SOURCE, ready_of(other.source.jobs[-1]), duo.now)
    duo.exchange()


def early(duo: Duo) -> None:
    idle(duo)
    duo.schedule()


def expecting(duo: Duo) -> None:
    duo.submit_to_sink("r")


def queued(duo: Duo) -> list[int] | None:
    """Blocks of a sequence that is in the way."""
    others = duo.sink.pool.allocate(7)
    duo.submit("r")
    duo.schedule()
    return others


def granted(duo: Duo) -> None:
    duo.lost = {KVGrant}
    duo.submit("r")
    duo.schedule()


def verifying(duo: Duo) -> None:
    finalizing(duo)
    duo.transfer()


def resending(duo: Duo) -> None:
    verifying(duo)
    duo.lost = {KVResend}
    duo.verify(matches=False)


def committed(duo: Duo) -> None:
    verifying(duo)
    duo.verify()


def quarantined(duo: Duo) -> None:
    granted(duo)
    duo.is_cut = True
    cancel_sink(duo)


def closed_sink(duo: Duo) -> None:
    expecting(duo)
    cancel_sink(duo)


def rejected(duo: Duo) -> None:
    early(duo)
    cancel_source(duo)


SINK_STATES: dict[K, Callable[[Duo], list[int] | None]] = {
    K.UNKNOWN: unknown,
    K.EARLY: early,
    K.EXPECTING: expecting,
    K.QUEUED: queued,
    K.GRANTED: granted,
    K.VERIFYING: verifying,
    K.RESENDING: resending,
    K.COMMITTED: committed,
    K.QUARANTINED: quarantined,
    K.CLOSED: closed_sink,
    K.REJECTED: rejected,
}
# The request has ended. Its granted blocks wait for KVDrained or a fence: no time makes them safe.
AWAIT_PROOF = {K.QUARANTINED}
NEVER_SUBMITTED = {K.UNKNOWN, K.EARLY, K.REJECTED}  # nothing to end: the claim alone is forgotten in time
SINK_ENDED = {K.COMMITTED, K.CLOSED} | AWAIT_PROOF
HELD_FROM_DEADLINE = {K.GRANTED, K.VERIFYING, K.RESENDING} | AWAIT_PROOF


def test_the_states_of_the_sink_without_a_deadline_are_those_named_here() -> None:
    assert set(SINK_STATES) == set(K)
    assert set(record.UNTIL_SAFE) == AWAIT_PROOF
    assert set(record.OVER) == {K.UNKNOWN, K.REJECTED} | SINK_ENDED - AWAIT_PROOF, "these go with their tombstone"


@pytest.mark.parametrize("state", K)
def test_the_deadline_ends_each_state_of_a_sink(state: K) -> None:
    duo = Duo()
    others = SINK_STATES[state](duo) or []
    duo.is_cut = True
    manager = duo.sink.manager
    machine = manager.ledger.records[KEY].machine
    assert machine.state is state
    due = 0 if state in NEVER_SUBMITTED else 1
    deadline = START_S + (Timeouts().connect_s if state in NEVER_SUBMITTED else DEADLINE_S)
    duo.tick(deadline - duo.now - 0.1)
    assert duo.ends["sink", "r"] == (1 if state in SINK_ENDED else 0)
    assert machine.state is state
    duo.tick(0.1)
    assert duo.ends["sink", "r"] == due
    assert manager.ledger.num_quarantined == (2 if state in HELD_FROM_DEADLINE else 0)
    duo.sink.manager.peers.lost(NodeKey("p", 1))
    duo.exchange()
    duo.fence_ends()
    duo.sink.pool.free(others, None)
    assert duo.sink.pool.num_free == duo.sink.pool.num_blocks
    assert manager.ledger.is_idle
    duo.tick(sink_ledger.TOMBSTONE_S + 1.0)
    assert not manager.ledger.records
    assert duo.ends["sink", "r"] == due


@pytest.mark.parametrize(("state", "outcome"), [(K.GRANTED, outcomes.Failed), (K.RESENDING, outcomes.Recompute)])
def test_a_lease_ends_a_hand_off_before_its_deadline_and_frees_nothing(state: K, outcome: type) -> None:
    """A source that does not get on with it in time: its blocks come back by its own word."""
    duo = Duo()
    manager, lease_s = duo.sink.manager, DEADLINE_S / 2
    manager.line._lease_s = lease_s
    SINK_STATES[state](duo)
    machine, granted_at = manager.ledger.records[KEY].machine, duo.now
    duo.is_cut = True
    duo.tick(granted_at + lease_s - duo.now - 0.1)
    assert (machine.state, duo.ends["sink", "r"]) == (state, 0)
    duo.tick(0.2)
    assert (machine.state, duo.ends["sink", "r"]) == (K.QUARANTINED, 1)
    assert [type(each) for each in duo.outcomes] == [outcome]
    assert manager.ledger.num_quarantined == 2
    duo.is_cut, duo.lost = False, set()
    for _ in range(8):
        duo.turn()
    assert manager.ledger.num_quarantined == 0
    assert duo.sink.pool.num_free == duo.sink.pool.num_blocks
    assert duo.ends["sink", "r"] == duo.ends["source", "r"] == 1
