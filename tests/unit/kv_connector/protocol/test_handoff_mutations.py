"""The explorer finds what it is there to find: each mutation of the tables, the machines or the world is caught."""

from __future__ import annotations

import dataclasses

import pytest
from handoff_explorer import explore
from handoff_setting import Setting, ViolationError

from tandem.kv_connector.protocol import sink_table, source_table
from tandem.kv_connector.protocol.sink_table import SinkAction as KA
from tandem.kv_connector.protocol.sink_table import SinkEvent as KE
from tandem.kv_connector.protocol.sink_table import SinkMachine
from tandem.kv_connector.protocol.sink_table import SinkState as KS
from tandem.kv_connector.protocol.source_table import SourceAction as PA
from tandem.kv_connector.protocol.source_table import SourceEvent as PE
from tandem.kv_connector.protocol.source_table import SourceMachine
from tandem.kv_connector.protocol.source_table import SourceState as PS

ALONE = {"granted": (1,), "hits": (0,), "submitted": True}
LANDS = "lands in a block"
STUCK = "no way to an end|waits for ever|leaves|leak"
ACROSS = LANDS + "|freed while|ends twice|the sink says"
FREED = (KA.CLOSE_GRANT, KA.UNPIN, KA.FREE)


class LossOfAnyEpoch(SinkMachine):
    def on_source_lost(self, source_epoch):
        return super().on_source_lost(self.source_epoch)

    def on_fenced(self, source_epoch):
        return super().on_fenced(self.source_epoch)


class EndlessResends(SinkMachine):
    def on_verified(self, grant_id, round, matches):
        self.max_resends = round + 1
        return super().on_verified(grant_id, round, matches)


class GrantAfterTheEnd(SourceMachine):
    """Takes a grant although it has said that it never will."""

    def on_grant(self, grant_id, source_epoch, sink_epoch):
        if self.state is PS.DRAINED:
            self.state = PS.PARKED
        return super().on_grant(grant_id, source_epoch, sink_epoch)


def sink_rows(state, event, after, *actions):
    return {"sink_rows": {**sink_table._ROWS, (state, event): (after, actions)}}


def source_rows(state, event, after, *actions):
    return {"source_rows": {**source_table._ROWS, (state, event): (after, actions)}}


# name: (what is mutated, faults that are offered, what the explorer must say)
MUTATIONS = {
    "sink frees on cancel": (
        sink_rows(KS.GRANTED, KE.CANCEL, KS.CLOSED, *FREED, KA.SEND_REFUSED, KA.END_CANCELLED), {"cancel"}, LANDS,
    ),
    "lease taken for a fence": (
        sink_rows(KS.GRANTED, KE.LEASE, KS.CLOSED, *FREED, KA.SEND_REFUSED, KA.END_FAILED), {"lease"}, LANDS,
    ),
    "lost source taken for a fenced one": (
        sink_rows(KS.GRANTED, KE.SOURCE_LOST, KS.CLOSED, *FREED, KA.END_FAILED), {"suspect_source"}, LANDS,
    ),
    "release taken for drained": (
        sink_rows(KS.GRANTED, KE.RELEASE, KS.CLOSED, *FREED, KA.END_RELEASED), {"source_deadline"}, LANDS,
    ),
    "recompute frees at once": (
        sink_rows(KS.RESENDING, KE.LEASE, KS.CLOSED, *FREED, KA.SEND_REFUSED, KA.RECOMPUTE),
        {"corrupt", "lease"}, LANDS,
    ),
    "commit without verification": (
        sink_rows(KS.GRANTED, KE.READY, KS.COMMITTED, KA.CLOSE_GRANT, KA.COMMIT, KA.SEND_COMMITTED),
        {"corrupt"}, "is committed with blocks",
    ),
    "digests not compared": ({"flaws": frozenset({"no_digest_check"})}, {"corrupt"}, "is committed with blocks"),
    "epoch of a lost source not compared": (
        {"sink_machine": LossOfAnyEpoch, "submitted": False, "granted": (1, 1), "hits": (0, 0)},
        {"crash_source"}, LANDS,
    ),
    "resend without bound": ({"sink_machine": EndlessResends}, {"corrupt"}, "more often than allowed"),
    "drained of another attempt accepted": (
        {"flaws": frozenset({"confuses_attempts"}), "granted": (1, 1), "hits": (0, 0)},
        {"source_deadline"}, ACROSS,
    ),
    "grant accepted after the end": (
        {"source_machine": GrantAfterTheEnd}, {"source_deadline"}, ACROSS,
    ),
    "source drains without retiring its jobs": (
        source_rows(PS.PUSHING, PE.CANCEL, PS.DRAINED, PA.FREE, PA.SEND_RELEASE, PA.SEND_DRAINED, PA.END_CANCELLED),
        {"cancel"}, "freed while a transfer job reads|lands in a block",
    ),
    "drained before the last write has landed": (
        {"flaws": frozenset({"retires_without_flush"})}, {"source_deadline"}, "lands in a block|freed while",
    ),
    "ready before the last write has landed": (
        {"flaws": frozenset({"ready_without_flush"}), "granted": (2,)}, {"corrupt"}, "lands in a block|freed while",
    ),
    "fence that lets writes through": (
        {"flaws": frozenset({"fence_lets_writes_through", "receiver_has_no_gate"}), "one_sided": False},
        {"suspect_source"}, LANDS,
    ),
    "fence of what a source was granted since it came back": (
        {"flaws": frozenset({"fence_of_newer_grants"}), "is_revocable": True, "submitted": False},
        {"suspect_source", "reconnect"}, LANDS,
    ),
    "first fence of a source that was lost twice": (
        {"flaws": frozenset({"first_fence_counts"}), "is_revocable": True, "submitted": False, "max_faults": 3},
        {"suspect_source", "reconnect"}, LANDS,
    ),
    "receiver without a gate": (
        {"flaws": frozenset({"receiver_has_no_gate"}), "one_sided": False},
        {"push_fails", "suspect_sink", "lease"}, LANDS,
    ),
    "a pull is answered twice": (
        {"flaws": frozenset({"answers_again"}), "submitted": False, "pulls": (0,), "max_faults": 3},
        {"duplicate", "source_deadline", "forget"}, ACROSS,
    ),
    "a pull is not asked for again": (
        {"flaws": frozenset({"asks_once"}), "submitted": False, "pulls": (0,)}, {"lose"}, STUCK,
    ),
    "parked KV without bound": (
        {"flaws": frozenset({"parks_without_bound"}), "granted": (1, 1), "hits": (0, 0), "source_blocks": 1,
         "sink_blocks": 1}, set(), STUCK,
    ),
    "pins never given up": (
        {"flaws": frozenset({"never_unpins"}), "granted": (3, 1), "hits": (0, 2), "source_blocks": 6,
         "sink_blocks": 4}, set(), STUCK,
    ),
    "ready is not sent again": (source_rows(PS.READY, PE.TIMER, PS.READY), {"lose"}, STUCK),
    "claim is not sent again": (
        {**source_rows(PS.CLAIMING, PE.TIMER, PS.CLAIMING), "max_parked": 0}, {"lose"}, STUCK,
    ),
    "quarantine does not ask": (
        sink_rows(KS.QUARANTINED, KE.TIMER, KS.QUARANTINED), {"lease", "lose", "suspect_sink"}, STUCK,
    ),
    "closed source does not answer": (
        source_rows(PS.CLOSED, PE.REFUSED, PS.CLOSED), {"suspect_sink"}, STUCK,
    ),
    "drained is not acknowledged by a tombstone": (
        sink_rows(KS.CLOSED, KE.DRAINED, KS.CLOSED), {"cancel", "lose"}, STUCK,
    ),
    "resend is not asked for again": (
        sink_rows(KS.RESENDING, KE.TIMER, KS.RESENDING), {"corrupt", "lose"}, STUCK,
    ),
    "a quarantined hand-off ends again": (
        sink_rows(KS.QUARANTINED, KE.RELEASE, KS.QUARANTINED, KA.END_RELEASED), {"lease", "cancel"}, "ends twice",
    ),
    "refused by a deadline, committed all the same": (
        sink_rows(KS.VERIFYING, KE.CANCEL, KS.VERIFYING, KA.SEND_REFUSED), {"cancel"},
        "committed on its sink and refused",
    ),
}  # fmt: skip


# README says: "a block that a peer may still write is never reused"
@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_found(name):
    mutation, faults, message = MUTATIONS[name]
    setting = Setting(name, **{"max_faults": 2, "faults": frozenset(faults), **ALONE, **mutation})
    with pytest.raises(ViolationError, match=message) as caught:
        explore(setting)
    assert "shortest path:" in str(caught.value)
    mutated = ("source_rows", "sink_rows", "source_machine", "sink_machine", "flaws")
    sound = {key: value for key, value in mutation.items() if key not in mutated}
    faults = frozenset(faults) if len(sound.get("granted", ())) < 2 else frozenset()
    assert explore(Setting(name, **{"max_faults": 2, "faults": faults, **ALONE, **sound})).num_states > 25


def test_a_claim_that_overtakes_parked_kv_blocks_both_pools_unless_sources_claim_only_what_fits():
    """Prompt 0 is parked and fills the source; the claim of prompt 1 comes first and gets the sink's only block. A
    link keeps the order of claims, but a claim that was lost with its connection is sent again behind later ones."""
    both_full = Setting(
        "overtaken claim", submitted=True, source_blocks=1, max_parked=1, sink_blocks=1, max_faults=0,
        claims_what_fits=False,
    )  # fmt: skip
    with pytest.raises(ViolationError, match=STUCK) as caught:
        explore(both_full)
    assert str(caught.value).splitlines()[2:6] == [
        "  schedule 0", "  start_prompt 0", "  schedule 1", "  deliver claim 1 1 11",
    ]  # fmt: skip
    assert explore(dataclasses.replace(both_full, claims_what_fits=True)).num_final >= 1
