"""Every reachable state of running sequences that move keeps the promises: each token once, in order, every request
ends, every pool is whole (docs/verification.md). And faults put there on purpose are found."""

from __future__ import annotations

import pytest
from migration_explorer import explore
from migration_machines import Machine
from migration_setting import ALL_FAULTS, MigrationSetting

from tandem.node.departures import Departures
from tandem.router.requests.attempts import LiveAttempts
from tandem.router.requests.moves import Moves
from tests.worlds.setting import ViolationError

MOVE = ((0, 0, "a", "b"),)
PAIR = ("a", "b")
THERE_AND_ON = ((0, 0, "a", "b"), (0, 0, "b", "c"))
BOTH_WAYS = {"starts": ("a", "b"), "moves": ((0, 0, "a", "b"), (1, 0, "b", "a")), "nodes": PAIR, "max_outputs": 2}
SAMPLES = {"num_samples": 2, "moves": ((0, 0, "a", "b"), (0, 1, "a", "b")), "nodes": PAIR, "max_outputs": 2}
FEW = {"moves": MOVE, "nodes": PAIR, "max_outputs": 2}


def one_fault(*faults: str, **options: object) -> MigrationSetting:
    return MigrationSetting(" or ".join(faults), faults=frozenset(faults), **{**FEW, **options})  # type: ignore[arg-type]


EARLY = {"is_pipelined": True, "pushes_early": True}

QUICK = [
    (MigrationSetting("tokens in flight, an early push", **FEW, **EARLY, max_faults=0), 1_000),
    (MigrationSetting("one of two samples", **{**SAMPLES, "moves": MOVE}, max_faults=0, holds_tokens=True), 800),
    (one_fault("crash"), 6_000),
]
SLOW = [
    *((one_fault(fault, max_outputs=3, **EARLY), 5_000) for fault in sorted(ALL_FAULTS)),
    (MigrationSetting("two samples", **SAMPLES, max_faults=0, holds_tokens=True), 80_000),
    (MigrationSetting("both ways at once", **BOTH_WAYS, max_faults=0, holds_tokens=True), 50_000),
    (MigrationSetting("three nodes", THERE_AND_ON, max_faults=0, holds_tokens=True), 50_000),
]


@pytest.mark.parametrize(("setting", "min_states"), QUICK, ids=lambda value: getattr(value, "name", ""))
def test_every_reachable_state_keeps_the_promises(setting: MigrationSetting, min_states: int) -> None:
    report = explore(setting)
    print(setting.name, report)
    assert report.num_states >= min_states
    assert report.num_moved


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "min_states"), SLOW, ids=lambda value: getattr(value, "name", ""))
def test_every_reachable_state_keeps_the_promises_in_wider_bounds(setting: MigrationSetting, min_states: int) -> None:
    report = explore(setting, max_states=2_000_000)
    print(setting.name, report)
    assert report.num_states >= min_states


def _is_found(setting: MigrationSetting) -> None:
    with pytest.raises(ViolationError):
        explore(setting)


def test_found_a_sequence_that_leaves_for_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "_left_for_nowhere", lambda *_: [])
    _is_found(one_fault("give_up"))


def test_found_a_sequence_that_stays_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Departures, "_stay", lambda self, departure, reason: None)
    _is_found(one_fault("suspect_sink"))


def test_found_a_number_that_is_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has heard of it takes the second one for a repetition."""
    monkeypatch.setattr(LiveAttempts, "next_number", lambda self, request_id, attempt: attempt.number + 1)
    _is_found(one_fault("crash"))


def test_found_bytes_that_nobody_checks() -> None:
    _is_found(one_fault("corrupt", flaws=frozenset({"no_digest_check"})))


def test_found_a_successor_that_does_not_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the old node did not get through before it died is missing, unless the router starts over."""
    monkeypatch.setattr(Moves, "node_lost", lambda *_: None)
    _is_found(one_fault("crash"))
