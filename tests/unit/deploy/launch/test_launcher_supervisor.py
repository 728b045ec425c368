"""The supervisor's decisions: order, readiness, restarts, silence, draining."""

from __future__ import annotations

import random

import pytest

from tandem.deploy.launch.supervisor import (
    EXIT_BAD_CONFIG,
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_QUICK_FAILURES,
    QUICK_FAILURE_S,
    START_TIMEOUT_S,
    STOP_MARGIN_S,
    ChildState,
    Kill,
    Phase,
    Report,
    Serving,
    Start,
    Supervisor,
    Terminate,
)

LOST_S, DRAIN_S = 5.0, 20.0


@pytest.fixture
def supervisor() -> Supervisor:
    """Two nodes and a router, nothing started."""
    supervisor = Supervisor(LOST_S, DRAIN_S)
    for name, stage in (("prefill", 0), ("decode", 0), ("router", 1)):
        supervisor.add(name, stage)
    return supervisor


def bring_up(supervisor: Supervisor, now: float = 0.0) -> None:
    for name in ("prefill", "decode", "router"):
        supervisor.tick(now)
        supervisor.ready(name, now)
    assert all(child.state is ChildState.READY for child in supervisor.children.values())


def run_quietly(supervisor: Supervisor, since: float, until: float, beating: tuple[str, ...]) -> list[object]:
    """Ticks twice a second with heartbeats of `beating`; the actions."""
    actions: list[object] = []
    now = since
    while now < until:
        now += 0.5
        for name in beating:
            supervisor.beat(name, now)
        actions += supervisor.tick(now)
        supervisor.check_integrity()
    return actions


def test_the_router_starts_when_every_node_has_been_ready(supervisor: Supervisor) -> None:
    assert supervisor.tick(0) == [Start("prefill"), Start("decode")]
    assert supervisor.ready("prefill", 1) == []
    assert supervisor.tick(1) == []
    assert supervisor.ready("decode", 2) == []
    assert supervisor.tick(2) == [Start("router")]
    assert supervisor.ready("router", 3) == [Serving()]
    assert supervisor.ready("router", 3) == []


def test_a_dead_node_is_started_again_after_a_growing_pause(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    now = 100.0
    supervisor.tick(now)
    pauses = []
    for _ in range(3):
        (report,) = supervisor.exited("decode", -9, now)
        assert isinstance(report, Report)
        assert "signal 9" in report.text
        assert supervisor.tick(now) == []
        pauses.append(supervisor.children["decode"].start_at - now)
        now = supervisor.children["decode"].start_at
        for name in ("prefill", "router"):
            supervisor.beat(name, now)
        assert supervisor.tick(now) == [Start("decode")]
    assert pauses == [FIRST_BACKOFF_S, 2 * FIRST_BACKOFF_S, 4 * FIRST_BACKOFF_S]
    assert supervisor.ready("decode", now) == [], "the whole was announced before"


def test_a_node_that_served_for_long_starts_afresh(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    child = supervisor.children["decode"]
    child.num_quick_failures = MAX_QUICK_FAILURES - 1
    supervisor.exited("decode", 1, QUICK_FAILURE_S + 1)
    assert child.num_quick_failures == 1
    assert supervisor.phase is Phase.RUNNING


def test_five_quick_failures_end_everything_with_the_last_words(supervisor: Supervisor) -> None:
    now, actions = 0.0, []
    for _ in range(MAX_QUICK_FAILURES):
        now = max(now, supervisor.children["decode"].start_at)
        supervisor.tick(now)
        actions = supervisor.exited("decode", -9, now, "out of memory")
    assert isinstance(actions[0], Report)
    assert "out of memory" in actions[0].text
    assert actions[1:] == [Terminate("prefill")]
    assert supervisor.phase is Phase.STOPPING
    supervisor.exited("prefill", 0, now)
    assert (supervisor.phase, supervisor.exit_code) == (Phase.ENDED, 1)
    supervisor.check_integrity()


def test_a_node_that_fails_again_and_again_takes_nobody_down_that_serves(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    now = 0.0
    for _ in range(3 * MAX_QUICK_FAILURES):
        (report,) = supervisor.exited("decode", -9, now)
        assert isinstance(report, Report)
        backoff_s = supervisor.children["decode"].start_at - now
        now += backoff_s
        assert run_quietly(supervisor, now - 0.5, now, ("prefill", "router")) == [Start("decode")]
        supervisor.ready("decode", now)
        supervisor.check_integrity()
    assert backoff_s == MAX_BACKOFF_S
    assert supervisor.phase is Phase.RUNNING
    assert supervisor.children["prefill"].state is ChildState.READY


def test_a_bad_configuration_is_not_tried_again(supervisor: Supervisor) -> None:
    supervisor.tick(0)
    report, *rest = supervisor.exited("prefill", 2, 1, "tandem: no such folder")
    assert isinstance(report, Report)
    assert "its configuration is wrong" in report.text, "what it said is there already"
    assert rest == [Terminate("decode")]
    supervisor.exited("decode", -15, 2)
    assert (supervisor.phase, supervisor.exit_code) == (Phase.ENDED, 2)


def test_who_fails_before_it_was_ready_is_not_tried_again(supervisor: Supervisor) -> None:
    supervisor.tick(0)
    report, *rest = supervisor.exited("prefill", 1, 1, "OverflowError: no")
    assert isinstance(report, Report)
    assert "OverflowError: no" in report.text
    assert rest == [Terminate("decode")]
    supervisor.exited("decode", -15, 2)
    assert (supervisor.phase, supervisor.exit_code) == (Phase.ENDED, 1)


def test_who_was_ready_once_is_tried_again_though_it_fails_before_it_is(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    supervisor.exited("decode", 1, 1)
    now = supervisor.children["decode"].start_at
    assert run_quietly(supervisor, now - 0.5, now, ("prefill", "router")) == [Start("decode")]
    (report,) = supervisor.exited("decode", 1, now)
    assert isinstance(report, Report)
    assert supervisor.phase is Phase.RUNNING


def test_a_router_that_is_starved_gets_more_time_than_a_node(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    assert run_quietly(supervisor, 0, 4 * LOST_S, beating=("prefill", "decode")) == []
    assert run_quietly(supervisor, 4 * LOST_S, 5 * LOST_S, beating=("prefill", "decode")) == [
        Kill("router", "silent for 20 s")
    ]


def test_a_silent_node_is_killed_once_and_started_again(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    actions = run_quietly(supervisor, 0, LOST_S + 3, beating=("prefill", "router"))
    assert actions == [Kill("decode", "silent for 5 s")]
    supervisor.exited("decode", -9, LOST_S + 3)
    assert supervisor.children["decode"].state is ChildState.WAITING


def test_heartbeats_keep_a_node_alive(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    assert run_quietly(supervisor, 0, 60, beating=("prefill", "decode", "router")) == []


def test_a_launcher_that_was_stopped_itself_kills_nobody(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    supervisor.tick(0.5)
    assert supervisor.tick(500) == []
    assert run_quietly(supervisor, 500, 520, beating=("prefill", "decode", "router")) == []


def test_a_start_that_never_ends_is_killed(supervisor: Supervisor) -> None:
    assert len(supervisor.tick(0)) == 2
    assert run_quietly(supervisor, 0, START_TIMEOUT_S, beating=()) == []
    killed = run_quietly(supervisor, START_TIMEOUT_S, START_TIMEOUT_S + 2, beating=())
    assert [action.name for action in killed] == ["prefill", "decode"]  # type: ignore[attr-defined]


def test_stopping_drains_the_router_first(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    assert supervisor.stop(10) == [Terminate("router")]
    assert run_quietly(supervisor, 10, 20, beating=()) == [], "silence is no matter while draining"
    assert supervisor.exited("router", 0, 20) == [Terminate("prefill"), Terminate("decode")]
    assert supervisor.exited("prefill", 0, 21) == []
    assert supervisor.exited("decode", 0, 22) == []
    assert (supervisor.phase, supervisor.exit_code) == (Phase.ENDED, 0)
    supervisor.check_integrity()


def test_whoever_does_not_drain_in_time_is_killed(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    supervisor.tick(0)
    supervisor.stop(0)
    assert run_quietly(supervisor, 0, DRAIN_S + STOP_MARGIN_S, beating=()) == []
    killed = run_quietly(supervisor, DRAIN_S + STOP_MARGIN_S, DRAIN_S + STOP_MARGIN_S + 2, beating=())
    assert [action.name for action in killed] == ["prefill", "decode", "router"]  # type: ignore[attr-defined]
    for name in ("prefill", "decode", "router"):
        supervisor.exited(name, -9, 100)
    assert (supervisor.phase, supervisor.exit_code) == (Phase.ENDED, 1)


def test_a_second_stop_kills_at_once(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    supervisor.stop(1)
    assert {action.name for action in supervisor.stop(2)} == {"prefill", "decode", "router"}  # type: ignore[union-attr]


def test_stopping_before_anything_started_ends_at_once(supervisor: Supervisor) -> None:
    assert supervisor.stop(0) == []
    assert (supervisor.phase, supervisor.exit_code) == (Phase.ENDED, 0)


def test_a_node_that_is_added_is_tried_again_and_holds_nobody_up(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    supervisor.add("decode-1", 0)
    assert Start("decode-1") in supervisor.tick(1)
    supervisor.exited("router", -9, 2)
    assert Start("router") in supervisor.tick(2 + FIRST_BACKOFF_S), "it does not wait for the new one"
    for code in (EXIT_BAD_CONFIG, 1):
        (report,) = supervisor.exited("decode-1", code, 3)
        assert "starting it again" in getattr(report, "text", "")
        supervisor.children["decode-1"].start_at = 3
        assert Start("decode-1") in supervisor.tick(3)
    assert supervisor.phase is Phase.RUNNING


def test_a_node_that_is_retired_drains_and_is_forgotten(supervisor: Supervisor) -> None:
    bring_up(supervisor)
    assert supervisor.retire("decode", 1) == [Terminate("decode")]
    assert supervisor.retire("decode", 2) == []
    assert run_quietly(supervisor, 2, 1 + DRAIN_S + STOP_MARGIN_S, ("prefill", "router")) == [], "it need not beat"
    (kill,) = run_quietly(supervisor, 1 + DRAIN_S + STOP_MARGIN_S, 33, ("prefill", "router"))
    assert isinstance(kill, Kill)
    (report,) = supervisor.exited("decode", -9, 34)
    assert isinstance(report, Report)
    assert "decode" not in supervisor.children
    supervisor.exited("prefill", -9, 35)
    assert supervisor.retire("prefill", 35) == []
    assert "prefill" not in supervisor.children, "it waited for its next start"


def test_random_histories_always_end(supervisor: Supervisor) -> None:
    for seed in range(300):
        rng = random.Random(seed)
        machine = Supervisor(LOST_S, DRAIN_S)
        for name, stage in (("a", 0), ("b", 0), ("c", 1)):
            machine.add(name, stage)
        now = 0.0
        for _ in range(60):
            now += rng.random() * 2
            alive = [child.name for child in machine.children.values() if child.alive]
            ends = "stop" if rng.random() < 0.1 else "tick"
            event = rng.choice(["tick", "tick", "ready", "exit", "beat", "retire", "add", ends])
            if event == "ready" and alive:
                machine.ready(rng.choice(alive), now)
            elif event == "exit" and alive:
                machine.exited(rng.choice(alive), rng.choice([0, 1, -9]), now)
            elif event == "beat" and alive:
                machine.beat(rng.choice(alive), now)
            elif event == "retire" and machine.children:
                machine.retire(rng.choice(list(machine.children)), now)
            elif event == "add" and machine.phase is Phase.RUNNING and "d" not in machine.children:
                machine.add("d", 0)
            elif event == "stop" and machine.phase is not Phase.ENDED:
                machine.stop(now)
            else:
                machine.tick(now)
            machine.check_integrity()
        if machine.phase is not Phase.ENDED:
            machine.stop(now)
        for child in machine.children.values():
            if child.alive:
                machine.exited(child.name, 0, now)
        assert machine.phase is Phase.ENDED
        machine.check_integrity()
