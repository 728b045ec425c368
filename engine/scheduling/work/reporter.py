"""What a node's work takes, and how it stands with it, for routers (docs/elastic.md). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from tandem.engine.contracts.wire.work import MOST_PROMPTS, NodeReport
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.planner import is_decoding
from tandem.engine.scheduling.prompt_order import SlackOrder
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.engine.scheduling.work.trend import Trend

# Prompt tokens of a step that is measured: below, its launch takes longer than they do.
MEASURED_TOKENS = 1024  # docs/measurements.md#deadlines-on-a-trace
MOST_COUNT = (1 << 31) - 1  # on the wire
LATELY_S = 2.0  # over which it is averaged how much of its time prompts take; a guess
STEPS_APART = 8  # of steps of decodes alone every so many is measured: adding up contexts takes a while; a guess


class WorkReporter:
    """Makes the report of a node's work. It is told of every step, and asked when a status is made."""

    def __init__(self, state: SchedulerState, s_per_token: Callable[[], float]) -> None:
        """`s_per_token`: seconds that a token of a prompt that comes now would take; 0.0: not known."""
        self._state, self._s_per_token = state, s_per_token
        self._steps = Trend()  # of decodes alone, by all their context
        self._prompts = Trend()  # a prompt's token, by how many are before it
        self._num_steps = 0
        self._worked_s, self._worked_at = 0.0, 0.0  # seconds spent on prompts, old ones fading; as of when

    def observed(self, output: SchedulerOutput, num_prompt_tokens: int, seconds: float, may_wait: bool = False) -> None:
        """Learns from a step that took `seconds`, of whose rows' tokens `num_prompt_tokens` are prompt work, and which
        perhaps waited for other nodes."""
        if not isinstance(self._state.prompt_order, SlackOrder):
            return  # nobody is told
        self._num_steps += 1
        if not num_prompt_tokens:
            if self._num_steps % STEPS_APART == 0:
                self._steps.measured(sum(row.start for row in output.rows), seconds)
            return
        context = sum(row.start for row in output.rows if row.num_tokens == 1)
        seconds -= self._steps.at(context) if context else 0.0
        if seconds <= 0:
            return
        self._worked_s, self._worked_at = self._worked_lately() + seconds, self._state.clock.now()
        if not may_wait and num_prompt_tokens >= min(MEASURED_TOKENS, self._state.options.max_num_batched_tokens // 2):
            behind = sum(row.num_tokens * (row.start + row.num_tokens / 2) for row in output.rows if row.num_tokens > 1)
            self._prompts.measured(behind / num_prompt_tokens, seconds / num_prompt_tokens)

    def _worked_lately(self) -> float:
        return self._worked_s * math.exp((self._worked_at - self._state.clock.now()) / LATELY_S)

    def report(self) -> NodeReport | None:
        """The report of the node's work now; None: it orders prompts by arrival, and nobody is promised anything."""
        state, order = self._state, self._state.prompt_order
        if not isinstance(order, SlackOrder):
            return None
        queues, now = state.queues, state.clock.now()
        # One whose last token is on its way takes no further step.
        streams = [r for r in queues.running if is_decoding(r) and r.num_launched_tokens < r.max_num_tokens]
        streams = [r for r in streams if r.prompt.mode != "prefill"]
        streams += [r for r in queues.waiting if r.block_ids and not r.has_help]
        started = [r for r in queues.running if r.can_advance and not is_decoding(r)]
        waiting = [r for r in queues.waiting if r.has_help or not r.block_ids]
        due = order.due(started, waiting, state.kv.num_cached_tokens)
        due.sort(key=lambda each: (each.priority, each.due_at, each.order))
        base_s, growth_s = self._prompts.line
        step_s, stream_s = self._steps.line
        return NodeReport(
            s_per_token=self._s_per_token(),
            least_s_per_token=base_s,
            attention_growth=growth_s / base_s if base_s else 0.0,
            free_s=max(0.0, state.clock.busy_until() - now),
            prompts=tuple((each.due_at - now, each.num_tokens) for each in due[:MOST_PROMPTS]),
            num_more_tokens=sum(each.num_tokens for each in due[MOST_PROMPTS:]),
            num_streams=len(streams),
            step_s=step_s + stream_s * sum(r.num_tokens for r in streams),
            stream_s_per_token=stream_s,
            free_tokens=min(state.pool.windows.most(state.pool.num_free) * state.block_size, MOST_COUNT),
            targets=state.targets,
            prompt_share=min(1.0, self._worked_lately() / LATELY_S),
            least_step_s=step_s,
        )
