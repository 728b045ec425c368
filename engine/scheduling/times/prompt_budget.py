"""How many prompt tokens a step may have beside running streams (docs/deadlines.md). Pure.

A step with a chunk of a prompt takes longer than one of decodes, and more by the token the fewer it has. So prompts
don't get what streams spare in each step: streams gather slack over steps of decodes alone, and a chunk that is worth
its launch spends it at once. Where all prompts are short, their parts are rows of the graph that runs the decodes: then
each step has as many as leave it within the time a token, and no gap is longer for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import chain, islice

from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.rate import AIMED_AT
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.times.step_times import StepTimes

# The least prompt tokens beside decodes, however long such a step takes; and the least that suffice where they cost
# nothing, since the graph that runs the decodes has room for them.
LEAST_PROMPT_TOKENS, LEAST_FREE_TOKENS = 32, 8  # docs/measurements.md#the-gap-of-a-hand-off; 8 is a guess
# Tokens of a step, streams' among them, whose chunk is worth its launch.
WORTHWHILE_TOKENS = 1024  # docs/measurements.md#deadlines-on-a-trace
# Parts of prompts of at most so many tokens are rows of that graph, wherever they lie in their prompt.
SHORT_TOKENS = 512  # docs/measurements.md#steps-of-few-rows
# Where nothing is promised: the prompt tokens that a step may have beside decodes, and how long it may take for more of
# them. An 8B model in bf16 takes about as long for as many; docs/measurements.md#steps-of-few-rows.
PLAIN_TOKENS, PLAIN_S = 2048, 0.050
GRAPH_STREAMS, GRAPH_PROMPTS = 256, 16  # that a graph of prompts has room for: kernels/backends/triton_captured.py
USED_SLACK = 0.9  # share of a stream's slack that a step may use: times are estimates; a guess
# Prompts that have waited for streams so many times as long as their chunk takes have it anyway, or they would starve
# where more is promised than the node can give. A guess.
PATIENCE = 4.0


def _tightest_tpot_s(streams: Iterable[Request]) -> float:
    """What is aimed at of the least time a token that is promised to these; infinity: nothing is promised."""
    return min((AIMED_AT * r.targets.tpot_s for r in streams if r.targets.tpot_s), default=math.inf)


def _is_rows(prompt: Request) -> bool:
    """Whether any part of what is left of it can be rows of the graph that runs the decodes."""
    return prompt.is_only_computed and prompt.num_launched_tokens <= SHORT_TOKENS


class PromptBudget:
    """Counts what streams can spare. Streams are the requests that decode in the step that is planned."""

    def __init__(self, options: SchedulerOptions, block_size: int, clock: StepClock, times: StepTimes) -> None:
        self._clock, self._times = clock, times
        self._most = options.max_num_batched_tokens
        self._given = options.decode_prompt_budget
        self._most_beside = self._given or self._most
        self._least = min(LEAST_PROMPT_TOKENS, block_size)
        self._had_at = 0.0  # when a step with prompt work was planned last

    def had(self) -> None:
        """Notes that the step that is planned has prompt work."""
        self._had_at = self._clock.now()

    def beside(self, streams: Collection[Request], prompts: Collection[Request] = ()) -> int:
        """The most prompt tokens of a step with these streams. `prompts`: those that are left to compute; none: very
        many."""
        gap_s = min((r.targets.itl_max_s for r in streams if r.targets.itl_max_s), default=math.inf)
        tpot_s = _tightest_tpot_s(streams)
        if tpot_s == math.inf:
            return self._within(gap_s, len(streams)) if gap_s < math.inf else self._unpromised(streams, prompts)
        num_wanted = self._worthwhile(prompts, len(streams))
        if prompts and all(map(_is_rows, prompts)):
            num_rows = self._num_rows_within(min(gap_s, tpot_s), len(streams))
            if num_rows:
                return min(self._most_beside, num_rows)
            if self._gains_slack(len(streams), tpot_s):  # a few rows are the least, and worth no more
                num_wanted = min(self._least, num_wanted)
                gap_s = min(gap_s, max(tpot_s, self._seconds(len(streams), num_wanted)))
        return self._of_slack(len(streams), num_wanted, self._slack_s(streams), gap_s)

    def s_per_token(self, streams: Collection[Request]) -> float:
        """Seconds that a token of the next prompt would take beside these streams; 0.0: not known."""
        if not streams:
            return self._seconds(0, self._most) / self._most
        tpot_s = _tightest_tpot_s(streams)
        if tpot_s == math.inf:
            budget = self.beside(streams)
            return self._seconds(len(streams), budget) / budget
        num_tokens, num_rows = self._worthwhile((), len(streams)), self._num_rows_within(tpot_s, len(streams))
        chunk_s, step_s = self._seconds(len(streams), num_tokens), self._seconds(len(streams), 0)
        gathered_s = step_s * max(0.0, chunk_s - tpot_s) / (tpot_s - step_s) if tpot_s > step_s else math.inf
        if num_rows and gathered_s > chunk_s:  # short prompts alone get on beside these
            return self._seconds(len(streams), num_rows) / num_rows
        return max(chunk_s, min(chunk_s + gathered_s, PATIENCE * chunk_s)) / num_tokens

    def _slack_s(self, streams: Collection[Request]) -> float:
        """How long the next step may take so that no stream's token is later than due. A stream that is late counts as
        one that has its next token in time: what is lost is lost."""
        begins_at, most = self._clock.busy_until(), math.inf
        for request in streams:
            tpot_s = AIMED_AT * request.targets.tpot_s
            if tpot_s and tpot_s < most:
                ahead_s = request.next_token_due(tpot_s, begins_at) - begins_at
                most = min(most, max(tpot_s, USED_SLACK * ahead_s))
        return most

    def _num_rows_within(self, seconds: float, num_streams: int) -> int:
        """How many rows for prompts the graph has whose step takes `seconds`; 0: too few, or that is time enough for a
        launch, or no step was measured."""
        room = self._room(seconds, num_streams) if self._times.are_measured else 0
        num_rows = min(SHORT_TOKENS - num_streams, room)
        return num_rows if self._least <= num_rows and room < WORTHWHILE_TOKENS else 0

    def _gains_slack(self, num_streams: int, tpot_s: float) -> bool:
        """Whether steps of so many streams alone leave some of their time, but not enough for a launch."""
        if not self._times.are_measured:
            return False
        return self._seconds(num_streams, 0) < tpot_s and self._room(tpot_s, num_streams) < WORTHWHILE_TOKENS

    def _of_slack(self, num_streams: int, num_wanted: int, slack_s: float, gap_s: float) -> int:
        chunk_s = min(gap_s, self._seconds(num_streams, num_wanted))
        has_waited_s = self._clock.now() - self._had_at
        if slack_s < chunk_s and has_waited_s < PATIENCE * chunk_s:
            return 0
        return self._within(min(gap_s, max(slack_s, chunk_s)), num_streams)

    def _unpromised(self, streams: Collection[Request], prompts: Collection[Request]) -> int:
        """Bounds prompt work beside streams to which nothing is promised: by the option, or by what takes `PLAIN_S` and
        what a graph of prompts has room for. A larger step is launched kernel by kernel, for which a busy host needs
        longer than the device (docs/measurements.md#parts-of-prompts-that-graphs-hold)."""
        token_s = self._clock.seconds_per_token
        by_time = int(PLAIN_S / token_s) if token_s else 0
        most, room = min(self._most, max(PLAIN_TOKENS, by_time)), self._room_in_graph(streams, prompts)
        return self._given or (min(most, room) if room >= WORTHWHILE_TOKENS else most)

    def _room_in_graph(self, streams: Collection[Request], prompts: Collection[Request]) -> int:
        """Tokens of the first prompts for which a graph has room beside streams; 0: none runs such a step."""
        if len(streams) > GRAPH_STREAMS or any(each.prompt.adapter for each in chain(streams, prompts)):
            return 0
        room = self._times.largest_graph - len(streams)
        if len(prompts) > GRAPH_PROMPTS:
            room = min(room, sum(prompt.num_uncomputed_tokens for prompt in islice(prompts, GRAPH_PROMPTS)))
        return room

    def _within(self, seconds: float, num_streams: int) -> int:
        """Finds how many tokens leave the step within `seconds`; at least a few."""
        least = self._least
        if self._times.are_measured:
            free = self._times.num_free_beside(num_streams)
            least = free if LEAST_FREE_TOKENS <= free < least else least
        return min(self._most_beside, max(self._room(seconds, num_streams), least))

    def _room(self, seconds: float, num_streams: int) -> int:
        """The most tokens for which `_seconds` says no more than `seconds`."""
        token_s = self._clock.seconds_per_token
        by_rate = int(seconds / token_s) if token_s else self._most_beside
        if not self._times.are_measured:
            return by_rate
        # Below that many the rate of prompts does not count.
        return min(self._times.most_tokens(seconds) - num_streams, max(by_rate, WORTHWHILE_TOKENS - 1))

    def _seconds(self, num_streams: int, num_tokens: int) -> float:
        """What a step of so many streams and prompt tokens takes, by the table made at start, and, where they are many,
        by what prompts took lately, which tells of their length."""
        token_s = self._clock.seconds_per_token * num_tokens
        if not self._times.are_measured:
            return token_s
        seconds = self._times.seconds(num_streams + num_tokens)
        return max(seconds, token_s) if num_streams + num_tokens >= WORTHWHILE_TOKENS else seconds

    def _worthwhile(self, prompts: Iterable[Request], num_streams: int) -> int:
        """How many tokens a chunk should have: what is left of few may be less."""
        enough, num_left = min(max(WORTHWHILE_TOKENS - num_streams, self._least), self._most_beside), 0
        for prompt in prompts:
            num_left += prompt.num_uncomputed_tokens
            if num_left >= enough:
                return enough
        return num_left or enough
