"""The explorer finds what it is there to find: each rule that is broken here, of the tables, the managers or the
transport, is missed somewhere within few faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from tandem.engine.blocks.reservations import Reservations
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVDrained
from tandem.kv_connector.protocol import sink_table, source_table
from tandem.kv_connector.protocol.jobs import Finalize, Retire
from tandem.kv_connector.protocol.sink_table import SinkAction as KA
from tandem.kv_connector.protocol.sink_table import SinkEvent as KE
from tandem.kv_connector.protocol.sink_table import SinkMachine
from tandem.kv_connector.protocol.sink_table import SinkState as KS
from tandem.kv_connector.protocol.source_table import SourceAction as PA
from tandem.kv_connector.protocol.source_table import SourceEvent as PE
from tandem.kv_connector.protocol.source_table import SourceMachine
from tandem.kv_connector.protocol.source_table import SourceState as PS
from tandem.kv_connector.pulls.puller import Puller
from tandem.kv_connector.pulls.server import PullServer
from tandem.kv_connector.sink.ledger import SinkLedger
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.sink.peers import SinkPeers
from tandem.kv_connector.source.actions import SourceActions
from tandem.kv_connector.source.ledger import SourceLedger
from tests.worlds.explorer import explore
from tests.worlds.setting import Setting, ViolationError
from tests.worlds.transport import Transport

ALONE = {"granted": (1,), "hits": (0,), "submitted": True}
LANDS = "lands in a block"
STUCK = "no way to an end|waits for ever, or leaks"
ACROSS = LANDS + "|freed while|ends twice|the sink says"
FREED = (KA.CLOSE_GRANT, KA.UNPIN, KA.FREE)
Patch = Callable[[pytest.MonkeyPatch], None]


def sink_row(state: KS, event: KE, after: KS, *actions: KA) -> Patch:
    return lambda patch: patch.setitem(sink_table._ROWS, (state, event), (after, actions))  # type: ignore[arg-type]


def source_row(state: PS, event: PE, after: PS, *actions: PA) -> Patch:
    return lambda patch: patch.setitem(source_table._ROWS, (state, event), (after, actions))  # type: ignore[arg-type]


def method(owner: type, name: str, instead: Callable[..., Any]) -> Patch:
    """`instead` gets the right method, then its arguments."""
    right = getattr(owner, name)
    return lambda patch: patch.setattr(owner, name, lambda *args, **rest: instead(right, *args, **rest))


def both(*patches: Patch) -> Patch:
    return lambda patch: [each(patch) for each in patches] and None


def _no_verdict(right: Any, self: SinkManager, record: Any, event: Any) -> None:
    right(self, record, replace(event, bad_indices=()))


def _of_any_epoch(right: Any, self: SinkLedger, source: NodeKey) -> list[Any]:
    return [record for record in self.records.values() if record.source_id == source.node_id]


def _endless(right: Any, self: SinkMachine, grant_id: int, round: int, matches: bool) -> Any:
    self.max_resends = round + 1
    return right(self, grant_id, round, matches)


def _grant_after_the_end(right: Any, self: SourceMachine, *args: Any) -> Any:
    """Takes a grant although it has said that it never will."""
    if self.state is PS.DRAINED:
        self.state = PS.PARKED
    return right(self, *args)


def _drained_for_all(right: Any, self: SinkManager, sender: NodeKey, message: Any, now: float) -> None:
    for request_id, _ in list(self.ledger.records) if isinstance(message, KVDrained) else []:
        right(self, sender, msgspec.structs.replace(message, request_id=request_id, grant_id=0), now)
    right(self, sender, message, now)


def _fenced_all(right: Any, self: SinkPeers, source: NodeKey) -> None:
    for record in self._ledger.of_source(source):
        record.machine.source_lost = True
    right(self, source)


def _first_fence_counts(right: Any, self: SinkPeers, source: NodeKey) -> None:
    self._fences[source] = 1
    right(self, source)


def _without_waiting_for(kind: type) -> Patch:
    def can_run(right: Any, self: Transport, owner: Any, one_sided: bool) -> bool:
        return isinstance(self.jobs[owner][0], kind) or right(self, owner, one_sided)

    return method(Transport, "can_run", can_run)


def _free_in_quarantine(right: Any, self: SinkManager, record: Any) -> None:
    right(self, record)
    if record.machine.state is KS.QUARANTINED and record.granted:
        self.ledger.free_granted(record)


def _retired_at_once(right: Any, self: SourceActions, record: Any, action: PA) -> None:
    right(self, record, action)
    if action is PA.RETIRE:
        self.run(record, record.machine.on_retired(record.machine.grant_id))


def _without_asking(right: Any, self: Reservations, num: int, kind: Any, owner: object = None, hits: Any = ()) -> bool:
    return self._has(num, hits)


NO_GATE = method(Transport, "lets_in", lambda right, self, grant_id: True)
LOST_AND_FOUND = {"suspect_source", "reconnect"}
# name: (what is broken, faults that are offered, what the explorer must say, the setting)
MUTATIONS: dict[str, tuple[Patch, set[str], str, dict[str, Any]]] = {
    "sink frees on cancel": (
        sink_row(KS.GRANTED, KE.CANCEL, KS.CLOSED, *FREED, KA.SEND_REFUSED, KA.END_CANCELLED), {"cancel"}, LANDS, {},
    ),
    "lease taken for a fence": (
        sink_row(KS.GRANTED, KE.LEASE, KS.CLOSED, *FREED, KA.SEND_REFUSED, KA.END_FAILED), {"lease"}, LANDS, {},
    ),
    "lost source taken for a fenced one": (
        sink_row(KS.GRANTED, KE.SOURCE_LOST, KS.CLOSED, *FREED, KA.END_FAILED), {"suspect_source"}, LANDS, {},
    ),
    "release taken for drained": (
        sink_row(KS.GRANTED, KE.RELEASE, KS.CLOSED, *FREED, KA.END_RELEASED), {"source_deadline"}, LANDS, {},
    ),
    "recompute frees at once": (
        sink_row(KS.RESENDING, KE.LEASE, KS.CLOSED, *FREED, KA.SEND_REFUSED, KA.RECOMPUTE), {"corrupt", "lease"}, LANDS,
        {},
    ),
    "commit without verification": (
        sink_row(KS.GRANTED, KE.READY, KS.COMMITTED, KA.CLOSE_GRANT, KA.COMMIT, KA.SEND_COMMITTED), {"corrupt"},
        "at last: deliver KVReady", {},
    ),
    "digests not compared": (
        method(SinkManager, "_on_verified", _no_verdict), {"corrupt"}, "is committed with blocks", {},
    ),
    "epoch of a lost source not compared": (
        both(
            method(SinkLedger, "of_source", _of_any_epoch),
            method(SinkMachine, "on_source_lost", lambda right, self, epoch: right(self, self.source_epoch)),
            method(SinkMachine, "on_fenced", lambda right, self, epoch: right(self, self.source_epoch)),
        ),
        {"crash_source"}, LANDS, {"submitted": False, "granted": (1, 1), "hits": (0, 0)},
    ),
    "resend without bound": (
        method(SinkMachine, "on_verified", _endless), {"corrupt"}, "more often than allowed", {"max_faults": 3},
    ),
    "drained of another attempt accepted": (
        method(SinkManager, "on_message", _drained_for_all), {"source_deadline"}, ACROSS,
        {"granted": (1, 1), "hits": (0, 0)},
    ),
    "grant accepted after the end": (
        method(SourceMachine, "on_grant", _grant_after_the_end), {"source_deadline", "cancel"}, ACROSS, {},
    ),
    "source drains without retiring its jobs": (
        source_row(PS.PUSHING, PE.CANCEL, PS.DRAINED, PA.FREE, PA.SEND_RELEASE, PA.SEND_DRAINED, PA.END_CANCELLED),
        {"cancel"}, "freed while a transfer job reads|lands in a block", {},
    ),
    "drained before the last write has landed": (
        _without_waiting_for(Retire), {"source_deadline"}, "lands in a block|freed while", {},
    ),
    "ready before the last write has landed": (
        _without_waiting_for(Finalize), {"corrupt"}, "lands in a block|freed while", {"granted": (2,)},
    ),
    "fence that lets writes through": (
        both(method(Transport, "drop_writes", lambda right, self, grants: None), NO_GATE), {"suspect_source"}, LANDS,
        {"one_sided": False},
    ),
    "fence of what a source was granted since it came back": (
        method(SinkPeers, "fenced", _fenced_all), LOST_AND_FOUND, LANDS, {"is_revocable": True, "submitted": False},
    ),
    "first fence of a source that was lost twice": (
        method(SinkPeers, "fenced", _first_fence_counts), LOST_AND_FOUND, LANDS,
        {"is_revocable": True, "submitted": False, "max_faults": 3},
    ),
    "receiver without a gate": (NO_GATE, {"push_fails", "suspect_sink", "lease"}, LANDS, {"one_sided": False}),
    "a pull is answered twice": (
        method(PullServer, "_note_answered", lambda right, self, key: None), {"duplicate", "source_deadline", "forget"},
        ACROSS, {"submitted": False, "pulls": (0,), "max_faults": 3},
    ),
    "a pull is not asked for again": (
        method(Puller, "on_tick", lambda right, self, now: setattr(self, "_now", now)), {"lose"}, STUCK,
        {"submitted": False, "pulls": (0,)},
    ),
    "parked KV without bound": (
        method(Reservations, "may_park", lambda right, self, claimed, most: True), set(), STUCK,
        {"granted": (1, 2, 1), "hits": (0, 0, 0), "priorities": (0, 0, 0), "source_blocks": 2, "sink_blocks": 2},
    ),
    "pins never given up": (
        method(Reservations, "make_room", _without_asking), set(), STUCK,
        {"granted": (3, 1), "hits": (0, 2), "source_blocks": 6, "sink_blocks": 4},
    ),
    "ready is not sent again": (source_row(PS.READY, PE.TIMER, PS.READY), {"lose"}, STUCK, {}),
    "claim is not sent again": (
        source_row(PS.CLAIMING, PE.TIMER, PS.CLAIMING), {"lose"}, STUCK, {"max_parked": 0},
    ),
    "quarantine does not ask": (
        sink_row(KS.QUARANTINED, KE.TIMER, KS.QUARANTINED), {"lease", "lose", "suspect_sink"}, STUCK, {},
    ),
    "closed source does not answer": (source_row(PS.CLOSED, PE.REFUSED, PS.CLOSED), {"suspect_sink"}, STUCK, {}),
    "drained is not acknowledged by a tombstone": (
        sink_row(KS.CLOSED, KE.DRAINED, KS.CLOSED), {"cancel", "lose"}, STUCK, {},
    ),
    "resend is not asked for again": (
        sink_row(KS.RESENDING, KE.TIMER, KS.RESENDING), {"corrupt", "lose"}, STUCK, {},
    ),
    "a quarantined hand-off ends again": (
        sink_row(KS.QUARANTINED, KE.RELEASE, KS.QUARANTINED, KA.END_RELEASED), {"lease", "cancel"}, "ends twice", {},
    ),
    "refused by a deadline, committed all the same": (
        sink_row(KS.VERIFYING, KE.CANCEL, KS.VERIFYING, KA.SEND_REFUSED), {"cancel"}, "committed after it was refused",
        {},
    ),
    "a manager that frees in quarantine": (
        method(SinkManager, "_tick", _free_in_quarantine), {"lease"}, LANDS, {},
    ),
    "a manager that hears no fence": (
        method(SinkPeers, "fenced", lambda right, self, source: None), {"crash_source"}, STUCK, {},
    ),
    "a manager that retires at once": (
        method(SourceActions, "_queue_job", _retired_at_once), {"cancel"}, "freed while|lands in a block", {},
    ),
    "a source that gives nothing back": (
        method(SourceLedger, "free", lambda right, self, record: setattr(record, "owns_blocks", False)), set(), STUCK,
        {},
    ),
    "a clock that is not set": (
        method(SourceActions, "await_answer", lambda right, self, record: None), {"lose"}, STUCK, {},
    ),
}  # fmt: skip


TAKE_LONG = (
    "parked KV without bound", "epoch of a lost source not compared", "a pull is answered twice", "pins never given up",
)  # fmt: skip


# README says: "a block that a peer may still write is never reused"
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in TAKE_LONG else name for name in MUTATIONS]
)
def test_each_mutation_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, faults, message, options = MUTATIONS[name]
    setting = Setting(name, **{"max_faults": 2, "faults": frozenset(faults), **ALONE, **options})
    with monkeypatch.context() as patch:
        mutate(patch)
        with pytest.raises(ViolationError, match=message) as caught:
            explore(setting)
    assert "shortest path:" in str(caught.value)
    faults_left = frozenset(faults) if len(setting.granted) < 2 else frozenset()
    assert explore(replace(setting, faults=faults_left)).num_states > 20


def test_a_claim_that_overtakes_parked_kv_blocks_both_pools_unless_sources_claim_only_what_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompt 0 is parked and fills the source; the claim of prompt 1 comes first and gets the sink's only block. A
    link keeps the order of claims, but a claim that was lost with its connection is sent again behind later ones."""
    both_full = Setting(
        "overtaken claim", submitted=True, source_blocks=1, max_parked=1, sink_blocks=1, max_faults=0,
    )  # fmt: skip
    assert explore(both_full).num_final >= 1
    monkeypatch.setattr(Reservations, "may_claim", lambda self, num: True)
    with pytest.raises(ViolationError, match=STUCK) as caught:
        explore(both_full)
    starts = [line.strip() for line in str(caught.value).splitlines()[2:5]]
    assert [line.split(" ")[0] for line in starts] == ["p", "p", "deliver"]
