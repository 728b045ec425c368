"""Every reachable state of the hand-off within stated bounds keeps its promises (docs/protocol.md, Invariants).

The minimal numbers of states keep a test from becoming empty unnoticed; the true ones stand in docs/measurements.md.
"""

from __future__ import annotations

import dataclasses

import pytest

from tandem.kv_connector.protocol import source_table
from tandem.kv_connector.protocol.source_table import SourceEvent, SourceState
from tests.worlds.explorer import explore
from tests.worlds.setting import ALL_FAULTS, BLOCK, Setting

POOL_FAULTS = frozenset({"lose", "lease", "crash_sink"})
LOST_AND_FOUND = frozenset({"suspect_source", "reconnect", "crash_source"})
ALONE = {"granted": (1,), "hits": (0,)}
FULL_POOLS = {"submitted": True, "source_blocks": 2, "max_parked": 1, "sink_blocks": 1}
LARGE_BESIDE_PARKED = {
    "granted": (1, 2),
    "submitted": True,
    "source_blocks": 2,
    "max_parked": 2,
    "sink_blocks": 2,
}
A_PULL = {**ALONE, "pulls": (0,)}
PULL_BESIDE_PROMPT = {
    "granted": (1, 1),
    "hits": (0, 0),
    "pulls": (1,),
    "source_blocks": 2,
    "max_parked": 1,
    "sink_blocks": 2,
}
BESIDE = {"window": BLOCK, "num_windows": 1}  # some layers see one block, the others everything
WINDOWS = {**ALONE, "granted": (2,), **BESIDE}
PINS = {"granted": (3, 1), "hits": (0, 2), "submitted": True, "source_blocks": 6, "sink_blocks": 4}

QUICK = [
    (Setting("no faults, any order of submits", max_faults=0), 5_000),
    (Setting("one request, one fault, one-sided", **ALONE, max_faults=1), 3_000),
    (Setting("one request, one fault, receiver writes", **ALONE, max_faults=1, one_sided=False), 3_000),
    (Setting("full pools", **FULL_POOLS, max_faults=0), 500),
    (Setting("full pools, the second matters more", **FULL_POOLS, priorities=(1, 0), max_faults=0), 500),
    (
        Setting(
            "large prompt that matters more beside a parked one", **LARGE_BESIDE_PARKED, priorities=(1, 0), max_faults=0
        ),
        500,
    ),
    (
        Setting("large prompt beside a parked one", **LARGE_BESIDE_PARKED, max_faults=1, faults=frozenset({"lose"})),
        2_000,
    ),
    (Setting("pinned prefix in the way", **PINS, max_faults=0), 500),
    (Setting("a pull, one fault, one-sided", **A_PULL, max_faults=1), 1_000),
    (Setting("a pull, one fault, receiver writes", **A_PULL, max_faults=1, one_sided=False), 1_500),
    (Setting("a pull beside a prompt, full pools", **PULL_BESIDE_PROMPT, max_faults=0), 1_500),
    (Setting("window blocks, one fault", **WINDOWS, max_faults=1), 5_000),
    (Setting("a pull of window blocks, one fault", **WINDOWS, pulls=(0,), max_faults=1), 1_000),
    (Setting("window blocks of a pinned prefix", **PINS, **BESIDE, max_faults=0), 2_000),
    (Setting("lost and found, one-sided", **ALONE, max_faults=2, faults=LOST_AND_FOUND), 1_000),
    (Setting("lost and found, revocable", **ALONE, max_faults=2, faults=LOST_AND_FOUND, is_revocable=True), 1_000),
]
SLOW = [
    (Setting("large prompt beside a parked one", **LARGE_BESIDE_PARKED, max_faults=1, faults=POOL_FAULTS), 8_000),
    (Setting("one request, two faults, one-sided", **ALONE, max_faults=2), 50_000),
    (Setting("lost and found, four times, one-sided", **ALONE, max_faults=4, faults=LOST_AND_FOUND), 10_000),
    (Setting("a pull, two faults, receiver writes", **A_PULL, max_faults=2, one_sided=False), 10_000),
    (Setting("a pull, three faults", **A_PULL, max_faults=3), 10_000),
    (Setting("a pull, lost and found", **A_PULL, max_faults=4, faults=LOST_AND_FOUND, one_sided=False), 10_000),
    (Setting("two pulls, one fault", granted=(1, 1), pulls=(0, 1), sink_blocks=2, max_faults=1), 10_000),
    (Setting("a pull beside a prompt, full pools, any fault", **PULL_BESIDE_PROMPT, max_faults=1), 10_000),
    (Setting("lost and found, receiver writes", **ALONE, max_faults=4, faults=LOST_AND_FOUND, one_sided=False), 10_000),
    (Setting("lost and found four times, revocable", **ALONE, max_faults=4, faults=LOST_AND_FOUND, is_revocable=True),
     10_000),
    (Setting("full pools, one fault of any kind", **FULL_POOLS, max_faults=1), 10_000),
    (Setting("one request, two faults, receiver writes", **ALONE, max_faults=2, one_sided=False), 10_000),
    (Setting("one request of two blocks, two faults", granted=(2,), hits=(0,), max_faults=2), 10_000),
    (Setting("two requests, one fault, one-sided", submitted=True, max_faults=1), 10_000),
    (Setting("two requests, one fault, receiver writes", submitted=True, max_faults=1, one_sided=False), 10_000),
    (Setting("pinned prefix in the way, one fault", **PINS, max_faults=1), 10_000),
    (Setting("pinned prefix in the way of who matters less", **PINS, priorities=(1, 0), max_faults=1), 10_000),
    (Setting("pinned prefix in the way of who matters more", **PINS, priorities=(0, -1), max_faults=1), 10_000),
    (Setting("full pools, the second matters more, one fault", **FULL_POOLS, priorities=(1, 0), max_faults=1), 10_000),
    (Setting("large one that matters more, one fault", **LARGE_BESIDE_PARKED, priorities=(1, 0), max_faults=1), 10_000),
    (
        Setting(
            "two requests, lost and found",
            max_parked=0,
            max_faults=2,
            faults=LOST_AND_FOUND - {"crash_source"},
            is_revocable=True,
        ),
        10_000,
    ),
]  # fmt: skip


# README says: "The hand-off protocol is two pure transition tables"
@pytest.mark.parametrize(("setting", "min_states"), QUICK, ids=lambda value: getattr(value, "name", ""))
def test_every_reachable_state_keeps_the_promises(setting, min_states):
    report = explore(setting)
    print(setting.name, report.num_states, report.num_transitions, report.num_lives)
    assert report.num_states >= min_states
    assert any(("d", "committed") in outcome for outcome in report.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "min_states"), SLOW, ids=lambda value: getattr(value, "name", ""))
def test_every_reachable_state_keeps_the_promises_in_wider_bounds(setting, min_states):
    report = explore(setting)
    print(setting.name, report.num_states, report.num_transitions, report.num_lives)
    assert report.num_states >= min_states


def test_each_kind_of_fault_changes_how_requests_end():
    """A fault that is never offered would prove nothing."""
    plain = explore(Setting("plain", **ALONE, max_faults=0))
    assert plain.outcomes == {frozenset({("p", "committed"), ("d", "committed")})}
    for fault in ALL_FAULTS - {"reconnect"}:
        report = explore(Setting(fault, **ALONE, max_faults=1, faults=frozenset({fault})))
        assert report.num_states > plain.num_states, fault
    lost = Setting("lost", **ALONE, max_faults=2, faults=frozenset({"suspect_source"}))
    found = explore(dataclasses.replace(lost, faults=lost.faults | {"reconnect"}))
    assert found.num_states > explore(lost).num_states


def test_wait_is_no_news_to_a_source():
    """The model leaves KVWait out of the network because of this."""
    for state in SourceState:
        assert source_table.transition(state, SourceEvent.WAIT) in (None, (state, ()))
