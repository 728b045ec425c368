"""Every reachable state of running sequences that move keeps the promises: each token once, in order, every request
ends, every pool is whole (docs/verification.md). And faults put there on purpose are found."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tandem.decode_node import node
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.sink.ledger import SinkLedger
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.manager import SourceManager
from tandem.node.departures import Departures
from tandem.router.requests.attempts import LiveAttempts
from tandem.router.requests.machine import RequestMachine
from tandem.router.requests.moves import Moves
from tests.worlds.explorer import explore
from tests.worlds.setting import BLOCK, MOVE_FAULTS, MoveSetting, ViolationError

THERE_AND_ON: Any = {"moves": ((0, 0, "a", "b"), (0, 0, "b", "c")), "names": ("a", "b", "c"), "max_outputs": 3}
BOTH_WAYS: Any = {"starts": ("a", "b"), "moves": ((0, 0, "a", "b"), (1, 0, "b", "a"))}
SAMPLES: Any = {"num_samples": 2, "moves": ((0, 0, "a", "b"), (0, 1, "a", "b"))}
EARLY: Any = {"is_pipelined": True, "num_prompt_tokens": 2 * BLOCK}  # a part is pushed while it runs
WINDOW: Any = {"window": BLOCK, "max_outputs": 4}  # a block passes before the end
STUCK = "no way to an end|waits for ever"
WRITTEN = "is written while somebody reads it"


def one_fault(*faults: str, **options: Any) -> MoveSetting:
    return MoveSetting(" or ".join(faults), faults=frozenset(faults), **options)


QUICK = [
    (MoveSetting("tokens in flight, an early push", **EARLY, max_faults=0), 2_000),
    (MoveSetting("one of two samples", **{**SAMPLES, "moves": SAMPLES["moves"][:1]}, max_faults=0), 2_000),
    (MoveSetting("a window", **WINDOW, max_faults=0), 5_000),
    (MoveSetting("a window of some layers", **WINDOW, num_windows=1, max_faults=0), 5_000),
    (one_fault("crash", holds_tokens=True), 3_000),
]
SLOW = [
    (one_fault("crash"), 15_000),
    *((one_fault(fault, max_outputs=3, **EARLY), 10_000) for fault in sorted(MOVE_FAULTS)),
    (MoveSetting("any fault, receiver writes", one_sided=False), 50_000),
    (MoveSetting("two faults", max_faults=2), 500_000),
    (MoveSetting("two samples", **SAMPLES, max_faults=0), 50_000),
    (MoveSetting("both ways at once", **BOTH_WAYS, max_faults=0, holds_tokens=True), 10_000),
    (MoveSetting("a window, two blocks pass", **{**WINDOW, "max_outputs": 5}, max_faults=0), 20_000),
    (one_fault("preempt", **WINDOW), 20_000),
    (one_fault("preempt", **WINDOW, num_windows=1), 20_000),
    (MoveSetting("three nodes", **THERE_AND_ON, max_faults=0, holds_tokens=True), 20_000),
]


@pytest.mark.parametrize(("setting", "min_states"), QUICK, ids=lambda value: getattr(value, "name", ""))
def test_every_reachable_state_keeps_the_promises(setting: MoveSetting, min_states: int) -> None:
    report = explore(setting)
    print(setting.name, report)
    assert report.num_states >= min_states
    assert any("moved" in outcome for outcome in report.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "min_states"), SLOW, ids=lambda value: getattr(value, "name", ""))
def test_every_reachable_state_keeps_the_promises_in_wider_bounds(setting: MoveSetting, min_states: int) -> None:
    report = explore(setting)
    print(setting.name, report)
    assert report.num_states >= min_states


def _no_verdict(right: Any, self: SinkManager, record: Any, event: Any) -> None:
    right(self, record, replace(event, bad_indices=()))


def _newest_alone(right: Any, request: Any, output: Any) -> Any:
    return right(request, output[-1:])


def _as_a_prompt(right: Any, self: SinkLedger, record: Any, *args: Any) -> None:
    kind, record.kind = record.kind, HandoffKind.PROMPT
    right(self, record, *args)
    record.kind = kind


def _one_too_late(right: Any, self: SinkLedger, record: Any, *args: Any) -> None:
    right(self, record, *args)
    record.first_window = min(record.first_window + 1, record.num_blocks - 1)


def _nothing(right: Any, *args: Any) -> Any:
    return []


def _never(right: Any, *args: Any) -> bool:
    return False


# name: (whose, what, its stand-in, which gets the right one first; faults that are offered; what the explorer must say,
# the setting)
MUTATIONS: dict[str, tuple[Any, str, Any, set[str], str, dict[str, Any]]] = {
    "a sequence that leaves for nowhere": (RequestMachine, "_left_for_nowhere", _nothing, {"give_up"}, STUCK, {}),
    "a departure that came to nothing and goes on": (Departures, "_stay", _nothing, {"suspect_sink"}, STUCK, {}),
    "a sequence that stays held": (Request, "resume", _nothing, {"suspect_sink"}, STUCK, {}),
    "a sequence that is not held": (Request, "pause", _nothing, set(), WRITTEN, {"max_outputs": 4}),
    "a sequence that goes on while it is read": (
        SourceManager, "holds_blocks", _never, {"suspect_sink"}, WRITTEN, {"max_outputs": 3},
    ),
    "a number that is used twice": (
        LiveAttempts, "next_number", lambda right, self, name, attempt: attempt.number + 1, {"crash"}, STUCK, {},
    ),
    "bytes that nobody checks": (SinkManager, "_on_verified", _no_verdict, {"corrupt"}, "is committed with blocks", {}),
    "a successor whose node is lost": (Moves, "node_lost", _nothing, {"crash"}, STUCK, {"holds_tokens": True}),
    "a tail of which only the newest token is heard": (
        node, "known_tokens", _newest_alone, set(), "has a hole", {"max_outputs": 4},
    ),
    "a window that is counted from behind the newest token": (
        SinkLedger, "pass_over", _as_a_prompt, set(), "the next row reads|" + STUCK, {**WINDOW, "holds_tokens": True},
    ),
    "window blocks that are sent one block too late": (
        SinkLedger, "pass_over", _one_too_late, set(), "which it has not|" + STUCK, {**WINDOW, "num_windows": 1},
    ),
    "a source that gives nothing back": (
        SourceLedger, "free", lambda right, self, record: setattr(record, "owns_blocks", False), set(), STUCK, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, what, instead, faults, message, options = MUTATIONS[name]
    right = getattr(owner, what)
    monkeypatch.setattr(owner, what, lambda *args: instead(right, *args))
    with pytest.raises(ViolationError, match=message) as caught:
        explore(one_fault(*faults, **options))
    assert "shortest path:" in str(caught.value)
