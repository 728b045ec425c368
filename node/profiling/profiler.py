"""A node's profiler: off until a router asks, on for so many steps or seconds, then a report.

It belongs to the step loop's thread, which alone launches what is profiled; a thread of its own makes the report.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.profiler import profile

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Message
from tandem.engine.contracts.wire.profile import Profiled, StartProfile, StopProfile
from tandem.engine.process.watched import watched_thread
from tandem.node.profiling.layer_times import LayerTimes
from tandem.node.profiling.report import FinishedProfile, ProfiledNode, make_report

KEPT_S = 600.0  # how long a report waits to be fetched; a guess
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProfileAsked:
    """An event for the step loop: a router's message."""

    sender: NodeKey
    message: StartProfile | StopProfile


@dataclass(frozen=True, slots=True)
class ReportMade:
    """An event for the step loop: the report of the profile that ended is there."""

    answer: Profiled


@dataclass(frozen=True, slots=True)
class _Running:
    message: StartProfile
    profiler: profile
    layers: LayerTimes | None
    counters: dict[str, float]
    began: float
    allocated_bytes: int


class NodeProfiler:
    """Makes at most one profile at a time. There is none, one that runs, one whose report is being made, or one to be
    fetched."""

    def __init__(
        self,
        node: ProfiledNode,
        replay_graphs: Callable[[bool], None],
        send: Callable[[NodeKey, Message], None],
        post: Callable[[object], None],
    ) -> None:
        """`replay_graphs`: says whether steps may be replayed. `send`: to a router. `post`: into the loop's inbox, from
        any thread."""
        self._node, self._replay_graphs, self._send, self._post = node, replay_graphs, send, post
        self._running: _Running | None = None
        self._is_making = False
        self._made: Profiled | None = None
        self._drop_at = 0.0
        self._asked_by: list[tuple[NodeKey, str]] = []  # who waits for the report, and for which answer
        self.is_on = False  # whether `after_turn` has anything to look at

    # --- events of the step loop ------------------------------------------------------------------------------

    def on_asked(self, event: ProfileAsked) -> None:
        if isinstance(event.message, StartProfile):
            self._send(event.sender, Profiled(ask=event.message.ask, error=self._start(event.message)))
            return
        self._asked_by.append((event.sender, event.message.ask))
        if self._running is not None:
            self._stop(self._running)
        elif not self._is_making:
            self._answer(self._made or Profiled(ask="", error="no profile was started, or its report is gone"))

    def on_made(self, event: ReportMade) -> None:
        self._is_making, self._made, self._drop_at = False, event.answer, time.monotonic() + KEPT_S
        if self._asked_by:
            self._answer(event.answer)

    def after_turn(self) -> None:
        """Ends what has run long enough, and forgets what nobody fetched. For when `is_on`."""
        running, now = self._running, time.monotonic()
        if running is not None:
            steps = self._node.num_steps() - running.counters["steps_read"]
            if steps >= running.message.steps or now - running.began >= running.message.seconds:
                self._stop(running)
        elif self._made is not None and now >= self._drop_at:
            self._made, self.is_on = None, False

    # --- the profile ------------------------------------------------------------------------------------------

    def _start(self, message: StartProfile) -> str:
        """Starts a profile. Returns why it can't, for people, or ""."""
        if self._running is not None or self._is_making:
            return "a profile runs already: stop it first"
        node, on_gpu = self._node, self._node.device.type == "cuda"
        layers = LayerTimes(node.model, node.attention, node.device) if message.by_layer and not node.is_rank else None
        # torch.profiler's own class would import torch's compiler first: seconds in which nothing is served.
        profiler = profile(use_kineto=True, use_device="cuda" if on_gpu else None, profile_memory=not on_gpu)
        try:
            profiler.__enter__()
        except Exception as error:  # of whatever kind: it costs this profile
            logger.exception("a profile can't start")
            return f"torch's profiler does not start: {error}"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(node.device)
        if layers is not None:
            layers.watch()
            self._replay_graphs(False)
        allocated = torch.cuda.memory_allocated(node.device) if on_gpu else 0
        self._made, self.is_on = None, True
        node.restart_turn()
        self._running = _Running(message, profiler, layers, node.counters(), time.monotonic(), allocated)
        logger.info("a profile begins: %d steps or %g s", message.steps, message.seconds)
        return ""

    def _stop(self, running: _Running) -> None:
        self._running, self._is_making = None, True
        if running.layers is not None:
            running.layers.unwatch()
            self._replay_graphs(True)
        seconds = time.monotonic() - running.began
        trouble = ""
        try:
            running.profiler.__exit__(None, None, None)
        except Exception as error:
            logger.exception("the profile can't end")
            trouble = f"torch's profiler failed: {error}"
        self._node.restart_turn()
        finished = FinishedProfile(
            running.profiler,
            running.layers,
            seconds,
            running.counters,
            self._node.counters(),
            running.allocated_bytes,
            trouble,
        )
        watched_thread(self._make, "tandem-profile", finished, on_failure=self._on_failure).start()

    def _make(self, finished: FinishedProfile) -> None:
        report, trace = make_report(self._node, finished)
        self._post(ReportMade(Profiled(ask="", report=report, trace=trace)))

    def _on_failure(self, error: BaseException) -> None:
        self._post(ReportMade(Profiled(ask="", error=f"the report can't be made: {error}")))

    def _answer(self, made: Profiled) -> None:
        """Sends the report to each router that waits for it, once."""
        for sender, ask in self._asked_by:
            self._send(sender, Profiled(ask=ask, error=made.error, report=made.report, trace=made.trace))
        self._asked_by.clear()
        self._made, self.is_on = None, False
