"""The step loop: what is launched when, what is read when, and when the pool hears of it."""

from __future__ import annotations

import pytest
from engine_harness import Harness

from tandem.engine.contracts.keys import AttemptKey


class Recorder:
    """Wraps the runner and the pool of a harness; `log` is what happened, in order."""

    def __init__(self, harness: Harness) -> None:
        self.log: list[str] = []
        runner, pool = harness.runner, harness.pool
        execute, run_until = runner.execute, runner.run_until
        launched, completed = pool.step_launched, pool.step_completed

        def spy(name, method, step_of):  # type: ignore[no-untyped-def]
            def call(argument, *hooks):  # type: ignore[no-untyped-def]
                self.log.append(f"{name} {step_of(argument)}")
                return method(argument, *hooks)

            return call

        runner.execute = spy("execute", execute, lambda output: output.step_id)  # type: ignore[method-assign]
        runner.run_until = spy("read", run_until, lambda step: step)  # type: ignore[method-assign]
        pool.step_launched = spy("launched", launched, lambda step: step)  # type: ignore[method-assign]
        pool.step_completed = spy("completed", completed, lambda step: step)  # type: ignore[method-assign]


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    harness = Harness()
    recorder = Recorder(harness)
    harness.add("a", [1, 2], max_tokens=3)
    harness.run()
    assert recorder.log == [
        *("launched 0", "execute 0"),
        *("launched 1", "execute 1", "read 0", "completed 0"),
        *("launched 2", "execute 2", "read 1", "completed 1"),
        *("read 2", "completed 2"),
    ]


def test_without_pipelining_each_step_is_read_at_once() -> None:
    harness = Harness(pipelined=False)
    recorder = Recorder(harness)
    harness.add("a", [1, 2], max_tokens=2)
    harness.run()
    assert recorder.log == [
        *("launched 0", "execute 0", "read 0", "completed 0"),
        *("launched 1", "execute 1", "read 1", "completed 1"),
    ]


@pytest.mark.parametrize("pipelined", [True, False])
def test_the_device_waits_behind_a_step_with_drafts_until_the_next_is_launched(pipelined: bool) -> None:
    harness = Harness(pipelined=pipelined, speculates=True)
    harness.add("a", [1, 2, 3], max_tokens=30)
    core, waited = harness.core, 0
    while core.has_work():
        harness.step()
        if core.device_waits:
            assert core.newest_read is not None
            assert core.newest_read.has_drafts
            assert not core.inflight
            core.launch()
            assert core.inflight
            assert not core.device_waits
            waited += 1
    assert (waited > 3) == pipelined
    harness.assert_output("a")
    harness.assert_empty()


def test_a_token_comes_one_step_after_its_launch() -> None:
    harness = Harness()
    harness.add("a", [1, 2], max_tokens=3)
    assert [len(harness.step()) for _ in range(4)] == [0, 1, 1, 1]


def test_idle_steps_do_nothing() -> None:
    harness = Harness()
    assert not harness.core.has_work()
    assert harness.core.step() == []
    assert not harness.core.inflight


@pytest.mark.parametrize("pipelined", [True, False])
def test_the_last_step_is_read_when_everything_was_aborted(pipelined: bool) -> None:
    harness = Harness(pipelined=pipelined)
    harness.add("a", [1, 2], max_tokens=9)
    harness.step()
    assert harness.core.inflight == pipelined
    harness.scheduler.state.abort(AttemptKey("a", 0))
    assert harness.core.has_work() == pipelined
    harness.run()
    assert not harness.core.inflight
    assert harness.pool.num_grantable == harness.pool.num_blocks, "no block is left cooling"


def test_failures_come_without_a_step() -> None:
    harness = Harness(num_blocks=2)
    harness.add("a", range(30), max_tokens=9)
    assert harness.core.has_work()
    assert [type(event).__name__ for event in harness.step()] == ["FailedEvent"]
    assert not harness.core.has_work()


def test_a_failing_device_ends_the_loop() -> None:
    harness = Harness()
    harness.add("a", [1, 2], max_tokens=9)
    harness.step()

    def fail(step_id: int) -> None:
        raise RuntimeError(f"device lost in step {step_id}")

    harness.runner.run_until = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(RuntimeError, match="device lost in step 0"):
        harness.step()


def launch_slowly(harness: Harness, is_done: bool) -> list[list]:
    """The launch of each step asks, half way, for what the step before made."""
    execute, early = harness.runner.execute, []

    def launch(output, between_layers):  # type: ignore[no-untyped-def]
        early.append(harness.core.read_ended())
        handle = execute(output)
        handle.done = lambda: is_done
        return handle

    harness.runner.execute = launch  # type: ignore[method-assign]
    return early


def test_what_an_ended_step_made_is_read_while_the_next_is_launched() -> None:
    harness = Harness()
    recorder = Recorder(harness)
    early = launch_slowly(harness, is_done=True)
    harness.add("a", [1, 2], max_tokens=3)
    assert [len(harness.core.step()) for _ in range(4)] == [0, 0, 0, 1]
    assert [len(events) for events in early] == [0, 1, 1]
    assert recorder.log == [
        *("launched 0", "execute 0"),
        *("launched 1", "read 0", "completed 0", "execute 1"),
        *("launched 2", "read 1", "completed 1", "execute 2"),
        *("read 2", "completed 2"),
    ]
    harness.scheduler.assert_empty()


def test_a_step_that_runs_is_not_waited_for_while_the_next_is_launched() -> None:
    harness = Harness()
    early = launch_slowly(harness, is_done=False)
    harness.add("a", [1, 2], max_tokens=3)
    harness.run()
    assert early == [[], [], []]
    harness.assert_output("a")
