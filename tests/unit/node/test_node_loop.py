"""Events that others wait for are served while a step runs; the others wait, and nobody overtakes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import pytest
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.keys import NodeKey
from tandem.node.control.board import LoopBoard
from tandem.node.loop import NodeLoop


class OneStep:
    """An engine core whose step is done when the test's events have been looked at."""

    def __init__(self, log: list[str], num_polls: int) -> None:
        self.log, self.polls_left = log, num_polls
        self.inflight = False
        self.newest_read, self.device_waits, self.read_decides = None, False, False
        self.is_behind = False

    @property
    def device_is_busy(self) -> bool:
        return self.polls_left > 0

    def has_work(self) -> bool:
        return self.polls_left > 0

    def launch(self, before_execution, between_layers) -> None:
        self.log.append("scheduled")
        before_execution()
        self.log.append("launched")

    @property
    def read_would_wait(self) -> bool:
        self.polls_left -= 1
        return self.polls_left > 0

    def read(self) -> list:
        self.log.append("read")
        return []


class Logic:
    """Says after each event what it was told, and asks to end when it has heard "stop"."""

    is_empty = True

    def __init__(self, log: list[str]) -> None:
        self.log, self.outbox = log, ["claim"]

    def on_transfer(self, event, now) -> None:
        self.log.append(event)
        self.outbox.append(f"answer to {event}")

    def on_tick(self, now) -> None: ...

    def drain_outbox(self) -> list:
        messages, self.outbox = self.outbox, []
        return [("peer", message) for message in messages]

    def drain_connects(self) -> list:
        return []

    def status(self, counters) -> None:
        return None

    def drain(self) -> None: ...


class Sender:
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def send(self, to: NodeKey, message: str) -> None:
        self.log.append(f"sent {message}")

    def connect(self, ref) -> None: ...


def make_loop(logic: Logic, core: OneStep, sender: Sender, **options: object) -> NodeLoop:
    return NodeLoop(logic, core, queue.SimpleQueue(), sender, LoopBoard(), drain_s=0.0, **options)  # type: ignore[arg-type]


def run(
    events: list[str], num_polls: int, serves: bool = True, decides: bool = False, ends_in_s: float = 0.0
) -> list[str]:
    log: list[str] = []
    core = OneStep(log, num_polls)
    core.read_decides, ends_at = decides, time.monotonic() + ends_in_s
    is_urgent = (lambda event: str(event).startswith("urgent")) if serves else None
    loop = make_loop(Logic(log), core, Sender(log), is_urgent=is_urgent, ends_at=lambda: ends_at)
    launch = core.launch

    def launch_and_post(*hooks) -> None:
        launch(*hooks)
        for event in events:
            loop._inbox.put(event)
        events.clear()
        loop.begin_drain()

    core.launch = launch_and_post  # type: ignore[method-assign]
    loop.run()
    return log


def test_claims_leave_before_the_step_is_launched_and_urgent_events_are_answered_while_it_runs() -> None:
    log = run(["urgent 1", "urgent 2"], num_polls=6)
    assert log[:3] == ["scheduled", "sent claim", "launched"]
    served = ["urgent 1", "sent answer to urgent 1", "urgent 2", "sent answer to urgent 2"]
    assert log[3:8] == [*served, "read"]


def test_what_is_not_urgent_waits_and_is_not_overtaken() -> None:
    log = run(["urgent 1", "other", "urgent 2"], num_polls=8)
    assert log[3:6] == ["urgent 1", "sent answer to urgent 1", "read"]
    assert log[6:8] == ["other", "urgent 2"]


def test_a_loop_that_is_not_told_what_is_urgent_serves_nothing_meanwhile() -> None:
    log = run(["urgent 1"], num_polls=1, serves=False)
    assert log[:5] == ["scheduled", "sent claim", "launched", "read", "urgent 1"]


def test_a_step_that_the_device_waits_for_is_waited_for_near_its_end_and_served_beside_before() -> None:
    assert run(["urgent 1"], num_polls=6, decides=True)[3:5] == ["read", "urgent 1"]
    assert run(["urgent 1"], num_polls=6, decides=True, ends_in_s=PATIENCE_S)[3] == "urgent 1"


class Undecided(OneStep):
    """The same behind whose step the device waits for one more."""

    def read(self) -> list:
        super().read()
        self.device_waits = True
        return ["a token"]

    def launch(self, *hooks) -> None:
        super().launch(*hooks)
        self.device_waits = False


class Telling(Logic):
    def on_engine_events(self, events) -> None:
        self.log += [f"told {event}" for event in events]


def test_a_step_that_had_to_wait_is_launched_before_the_last_ones_tokens_are_told() -> None:
    log: list[str] = []
    core = Undecided(log, num_polls=1)
    loop = make_loop(Telling(log), core, Sender(log), apply_effects=lambda: log.append("effects"))
    core.polls_left = 1
    launch = core.launch

    def launch_last(*hooks) -> None:
        launch(*hooks)
        core.polls_left = 0
        loop.begin_drain()

    core.launch = launch_last  # type: ignore[method-assign]
    loop.run()
    log = log[log.index("read") :]
    assert log[: log.index("told a token")] == ["read", "effects", "scheduled", "effects", "launched"]


class Reacting(Sender):
    """Does what a test wants done when that message is sent."""

    def __init__(self, log: list[str], **reactions: Callable[[], None]) -> None:
        super().__init__(log)
        self.reactions = reactions

    def send(self, to: NodeKey, message: str) -> None:
        super().send(to, message)
        self.reactions.get(message.split()[0], lambda: None)()


def test_the_next_step_is_decided_late_by_what_is_there_then() -> None:
    """Everything may be served meanwhile: one step alone is under way, as always between two turns."""
    log: list[str] = []
    core = OneStep(log, num_polls=3)

    def decide_at() -> float:
        return time.monotonic() + (-1.0 if "sent answer to other" in log else PATIENCE_S)

    sender = Reacting(log, claim=lambda: loop._inbox.put("other"))
    loop = make_loop(Logic(log), core, sender, launch_at=decide_at)
    launch = core.launch

    def launch_last(*hooks) -> None:
        launch(*hooks)
        loop.begin_drain()

    core.launch = launch_last  # type: ignore[method-assign]
    loop.run()
    assert log[:4] == ["sent claim", "other", "sent answer to other", "scheduled"]


def test_answers_do_not_wait_for_the_decision_nor_for_the_next_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else comes before the decision, and the loop looks up for nothing else."""
    monkeypatch.setattr("tandem.node.loop.HOLD_POLL_S", 10 * PATIENCE_S)
    log: list[str] = []
    core = OneStep(log, num_polls=3)

    def end() -> None:
        core.polls_left = 0
        loop.begin_drain()

    decide_at = time.monotonic() + PATIENCE_S
    loop = make_loop(Logic(log), core, Reacting(log, answer=end), launch_at=lambda: decide_at)
    loop._inbox.put("other")
    loop.run()
    assert log == ["other", "sent claim", "sent answer to other"]


def test_a_step_that_ends_early_is_followed_before_its_time() -> None:
    log: list[str] = []
    core, logic = OneStep(log, num_polls=3), Logic(log)
    decide_at, ticked_at = time.monotonic() + PATIENCE_S, list[float]()

    def tick(now: float) -> None:
        ticked_at.append(now)
        loop.begin_drain()

    logic.on_tick = tick  # type: ignore[method-assign]
    sender = Reacting(log, claim=lambda: setattr(core, "polls_left", 0))
    loop = make_loop(logic, core, sender, launch_at=lambda: decide_at)
    loop.run()
    assert log == ["sent claim"]
    assert ticked_at[0] < decide_at


def test_a_step_that_ends_sooner_than_expected_is_read_when_it_ends() -> None:
    """And urgent events are served meanwhile, whatever the estimate says. No other event wakes the loop."""
    log: list[str] = []
    core = OneStep(log, num_polls=50)
    is_urgent, ends_at = (lambda _: True), (lambda: time.monotonic() + 3600)
    loop = make_loop(Logic(log), core, Sender(log), is_urgent=is_urgent, ends_at=ends_at)
    launch = core.launch

    def launch_and_post(*hooks) -> None:
        launch(*hooks)
        loop._inbox.put("urgent 1")

    core.launch = launch_and_post  # type: ignore[method-assign]
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    wait_until(lambda: "read" in log, "the step to be read")
    loop.begin_drain()
    thread.join(PATIENCE_S)
    assert log[:6] == ["scheduled", "sent claim", "launched", "urgent 1", "sent answer to urgent 1", "read"]


def test_a_turn_that_does_not_end_is_noticed_by_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    logic = Logic(log)
    loop = make_loop(logic, OneStep(log, num_polls=3), Sender(log))
    seen: list[bool] = []

    def is_stuck(after_s: float) -> bool:
        monkeypatch.setattr("tandem.node.control.board.STUCK_S", after_s)
        return loop._board.is_stuck()

    def hangs(now: float) -> None:
        seen.append(is_stuck(PATIENCE_S))
        time.sleep(0.1)
        seen.append(is_stuck(0.09))
        loop.begin_drain()

    logic.on_tick = hangs  # type: ignore[method-assign]
    assert not is_stuck(0.0), "it does not run yet"
    loop.run()
    assert seen[:2] == [False, True]


class SlowLaunch(OneStep):
    """Launches layer by layer; the step before ends meanwhile."""

    def launch(self, before_execution, between_layers) -> None:
        before_execution()
        for num_layers in range(1, 4):
            self.log.append(f"layer {num_layers}")
            between_layers(num_layers)
        self.polls_left = 0

    def read_ended(self) -> list:
        return ["token"] if self.log[-1] == "layer 2" else []


class Answering(Logic):
    def on_engine_events(self, events) -> None:
        self.outbox += events


def test_what_the_step_before_made_is_sent_while_the_next_is_launched() -> None:
    log: list[str] = []
    core = SlowLaunch(log, num_polls=3)
    loop = make_loop(Answering(log), core, Sender(log))  # type: ignore[arg-type]
    loop.begin_drain()
    loop.run()
    assert log[:5] == ["sent claim", "layer 1", "layer 2", "sent token", "layer 3"]
