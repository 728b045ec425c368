"""What a node notes while it serves: messages of its newest requests, slow steps, hand-offs when asked for."""

from __future__ import annotations

import math
import time

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.parts import Message
from tandem.engine.scheduling.turn_times import TurnTimes
from tandem.kv_connector.transfer.trace import NO_REQUEST, HandoffTrace
from tandem.node.profiling.stories import Stories
from tandem.node.setup import DECODE_ITL_MAX_MS

SLOW_STEP_MS = 1.0  # beyond the longest that a step should take: such steps are counted by their reason; a guess


class NodeDiary:
    """The node's stories, the times of its turns, and, with `--handoff-trace`, the trace. `sent` and `received` may be
    called by any thread."""

    def __init__(self, options: NodeOptions, node_id: str) -> None:
        self.trace = HandoffTrace(options.handoff_trace, node_id) if options.handoff_trace else None
        self.stories = Stories()
        self.turn_times = self._make_turn_times(options)

    def sent(self, message: Message) -> None:
        self._note("sent", message)

    def received(self, message: Message) -> None:
        self._note("received", message)

    def close(self) -> None:
        if self.trace is not None:
            self.trace.flush()

    def _note(self, way: str, message: Message) -> None:
        self.stories.message(way, message)
        if self.trace is not None:
            self.trace.message(way, message)

    def _make_turn_times(self, options: NodeOptions) -> TurnTimes:
        """Makes the accounts of turns. No step of a prefill node counts as slow: nobody waits for one more than for
        another."""
        scheduler = options.scheduler
        longest_ms = scheduler.itl_max_ms or scheduler.tpot_target_ms or DECODE_ITL_MAX_MS
        slow_s = math.inf if options.role == "prefill" else (longest_ms + SLOW_STEP_MS) / 1e3
        trace = self.trace
        note = None if trace is None else lambda values: trace.note(NO_REQUEST, "slow step", **values)
        most = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        return TurnTimes(slow_s, time.monotonic, time.thread_time, note, most)
