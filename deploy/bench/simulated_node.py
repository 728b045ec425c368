"""A node that takes time but computes nothing: steps by a cost model, blocks in two LRU tiers. Pure: virtual time.

It works as a unified node does: each step takes all running decodes and up to a chunk of the prompts that came first,
or, with targets, that are due first, as far as the decodes have time (docs/deadlines.md).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.deploy.bench.simulated_cache import TieredCache
from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.engine.scheduling.prompt_order import SlackOrder
from tandem.engine.scheduling.step_times import AIMED_AT, LEAST_PROMPT_TOKENS, PATIENCE, USED_SLACK, WORTHWHILE_TOKENS


@dataclass(frozen=True)
class CostModel:
    """The costs of a node's work in seconds. The defaults are those of an 8B model in bf16 on one H200:
    docs/measurements.md."""

    prefill_s_per_token: float = 1 / 44_000  # without context
    prefill_s_per_token_and_context: float = 1 / 44_000 / 33_000  # attention is as much again at 33k tokens of context
    step_s: float = 0.0045  # of a step, whatever is in it: weights are read once
    launch_s: float = 0.033  # least of a step with prompt work: the host launches it layer by layer
    sequence_s: float = 25e-6  # of a step, for each sequence that decodes
    context_s_per_token: float = 31e-9  # of a step, for each token of context that decodes attend to
    host_s_per_token: float = 2.6e-6  # a hit in host memory, brought back
    fetch_s_per_token: float = 0.0  # a hit on a peer, brought here; 0: nodes don't fetch
    chunk: int = 2048
    max_num_seqs: int = 256


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through a node. Times are virtual."""

    request: TraceRequest
    hashes: Sequence[bytes]
    arrived_at: float
    num_fetched_tokens: int = 0  # that a peer has and this node will fetch, by the router's reckoning
    num_computed: int = 0
    hits: dict[str, int] = field(default_factory=dict)  # tokens by tier
    first_token_at: float = 0.0
    finished_at: float = 0.0
    # What the order of prompts asks of a request.
    targets: Targets = NO_TARGETS
    waited_s: float = 0.0
    priority: int = 0
    order: int = 0

    @property
    def prompt(self) -> Job:
        return self

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.request.num_prompt_tokens - self.num_computed


class SimulatedNode:
    """`submit` jobs; when `next_at` is reached call `advance`. Both return nothing; `done` collects finished jobs."""

    def __init__(
        self, node_id: str, costs: CostModel, gpu_tokens: int, host_tokens: int, targets: Targets = NO_TARGETS
    ) -> None:
        self.node_id = node_id
        self.next_at = math.inf
        self._now = self._had_at = 0.0
        self._targets = targets
        # It asks of requests and of the clock only what jobs and this node have.
        self._order = SlackOrder(targets.ttft_s, self) if targets.tpot_s else None  # type: ignore[arg-type]
        self.busy_s = self.prefill_s = 0.0
        self.done: list[Job] = []
        self.cache = TieredCache(gpu_tokens // TRACE_BLOCK, host_tokens // TRACE_BLOCK)
        self.num_blocks = gpu_tokens // TRACE_BLOCK
        self._costs = costs
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._ending: list[Job] = []  # prompts that the step under way completes
        self._decoding: list[tuple[int, int, Job]] = []  # heap by the step that makes the last token
        self._num_steps = self._num_jobs = self._context = 0
        self._run = (0.0, 0.0, 0)  # of decode steps alone: began at, seconds of one, how many
        self._prefill_rate = Rate()

    # --- what a Status tells ----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens without KV: of waiting prompts all, for nobody has looked yet what the cache holds of them."""
        waiting = sum(job.request.num_prompt_tokens for job in self._waiting)
        return waiting + sum(job.num_uncomputed_tokens for job in self._prefilling)

    @property
    def num_free_blocks(self) -> int:
        return max(0, self.num_blocks - self._context // TRACE_BLOCK)

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds that a prompt token takes, as measured in steps; 0 before the first."""
        return self._prefill_rate.seconds

    # --- the clock of prompts ---------------------------------------------------------------------------------

    def now(self) -> float:
        return self._now

    def busy_until(self) -> float:
        return self._now

    @property
    def seconds_per_token(self) -> float:
        return self._prefill_rate.seconds

    # --- events -----------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        self._now = now
        self._num_jobs += 1
        job.order, job.targets = self._num_jobs, self._targets
        self._waiting.append(job)
        if self._order is not None:
            self._order.arrived(job)  # type: ignore[arg-type]
        if self.next_at == math.inf:
            self._start(now)
        elif self._run[2] > 1:  # decode steps one after the other: the prompt joins after the one under way
            began, step_s, _ = self._run
            num_steps = max(1, math.ceil((now - began) / step_s - 1e-9))
            self._run = began, step_s, num_steps
            self.next_at = began + num_steps * step_s

    def advance(self) -> None:
        """Ends the step, or run of decode steps, that is under way."""
        now, (began, step_s, num_steps) = self.next_at, self._run
        self._now = now
        if num_steps:
            self.busy_s += num_steps * step_s
            self._context += (num_steps - 1) * len(self._decoding)
            self._num_steps += num_steps
            self._run = began, step_s, 0
        else:
            self._num_steps += 1
        self._context += len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.request.num_prompt_tokens + job.request.num_output_tokens - 1
            self._finish(job, now)
        for job in self._ending:
            self._first_token(job, now)
        self._ending = []
        self._start(now)

    def _first_token(self, job: Job, now: float) -> None:
        job.first_token_at = now
        if self._order is not None:
            self._order.ended(job)  # type: ignore[arg-type]
        self.cache.use(job.hashes)
        num_more = job.request.num_output_tokens - 1
        if not num_more:
            self._finish(job, now)
            return
        self._context += job.request.num_prompt_tokens
        heapq.heappush(self._decoding, (self._num_steps + num_more, job.order, job))

    def _finish(self, job: Job, now: float) -> None:
        job.finished_at = now
        self.done.append(job)

    def _start(self, now: float) -> None:
        costs, rows = self._costs, len(self._decoding)
        step_s = costs.step_s + rows * costs.sequence_s + self._context * costs.context_s_per_token
        has_prompts = bool(self._prefilling or self._waiting)
        spare_s = self._spare_s(step_s, now) if has_prompts else 0.0
        prompt_s = self._plan_prompts(spare_s - step_s) if spare_s else 0.0
        if not prompt_s and not rows:
            self.next_at = math.inf
            return
        if prompt_s:
            self._had_at = now
            step_s = max(costs.launch_s, step_s + prompt_s)
            self.busy_s += step_s
            self.prefill_s += prompt_s
            self.next_at = now + step_s
            return
        num_steps = 1 if has_prompts else max(1, self._decoding[0][0] - self._num_steps)
        self._run = now, step_s, num_steps
        self.next_at = now + num_steps * step_s

    def _spare_s(self, step_s: float, now: float) -> float:
        """How long a step with prompts may take, as `PromptBudget` of a real node has it; 0.0: it should have none."""
        spare_s = self._slack_s()
        if spare_s == math.inf:
            return spare_s
        num_left = sum(job.num_uncomputed_tokens for job in (*self._prefilling, *self._waiting))
        token_s = max(self._costs.prefill_s_per_token, self._prefill_rate.seconds)
        chunk_s = max(self._costs.launch_s, step_s + min(WORTHWHILE_TOKENS, num_left) * token_s)
        if spare_s < chunk_s and now - self._had_at < PATIENCE * chunk_s:
            return 0.0
        return max(spare_s, chunk_s)

    def _plan_prompts(self, spare_s: float) -> float:
        """Seconds of the prompt work in the next step: about `spare_s` at most."""
        budget, seconds = self._costs.chunk, 0.0
        planned: list[tuple[Job, int]] = []
        for job in self._arranged():
            if job not in self._prefilling:
                if not self._has_room(job):
                    if self._order is None:
                        break
                    continue
                self._waiting.remove(job)
                self._prefilling.append(job)
                seconds += self._look_up(job)
            num_tokens = min(budget, job.num_uncomputed_tokens)
            part_s = self._seconds_of(job, num_tokens)
            if seconds + part_s > spare_s:
                fitting = int(num_tokens * max(0.0, spare_s - seconds) / part_s)
                num_tokens = min(num_tokens, max(fitting, 0 if seconds else LEAST_PROMPT_TOKENS))
                part_s = self._seconds_of(job, num_tokens)
            if num_tokens:
                self._measure(part_s, num_tokens)
            seconds += part_s
            planned.append((job, num_tokens))
            job.num_computed += num_tokens
            budget -= num_tokens
            if not job.num_uncomputed_tokens:
                self._prefilling.remove(job)
                self._ending.append(job)
            if not budget or seconds >= spare_s:
                break
        if self._order is not None:
            self._order.launched(planned)  # type: ignore[arg-type]
        return seconds

    def _arranged(self) -> Sequence[Job]:
        if self._order is None:
            return [*self._prefilling, *self._waiting]
        arranged = self._order.arrange(list(self._prefilling), list(self._waiting), self._num_cached)  # type: ignore[arg-type]
        return arranged  # type: ignore[return-value]

    def _num_cached(self, job: Job) -> int:
        return min(TRACE_BLOCK * self.cache.match(job.hashes)[0], job.num_prompt_tokens - 1)

    def _seconds_of(self, job: Job, num_tokens: int) -> float:
        costs, middle = self._costs, job.num_computed + num_tokens / 2
        return num_tokens * (costs.prefill_s_per_token + costs.prefill_s_per_token_and_context * middle)

    def _slack_s(self) -> float:
        most, targets = math.inf, self._targets
        for end, _, job in self._decoding if targets.tpot_s else ():
            tpot_s = AIMED_AT * targets.tpot_s
            num_made = job.request.num_output_tokens - (end - self._num_steps)
            ahead_s = job.first_token_at + num_made * tpot_s - self._now
            most = min(most, max(tpot_s, USED_SLACK * ahead_s))
        return most

    def _has_room(self, job: Job) -> bool:
        if self.num_running >= self._costs.max_num_seqs:
            return False
        return not self._decoding or self.num_free_blocks * TRACE_BLOCK >= job.request.num_prompt_tokens

    def _look_up(self, job: Job) -> float:
        """Sets what need not be computed; returns the seconds that it takes to get it."""
        num_blocks, in_host = self.cache.match(job.hashes)
        most = job.request.num_prompt_tokens - 1
        held = min(num_blocks * TRACE_BLOCK, most)
        from_host = min(in_host * TRACE_BLOCK, held)
        fetched = max(0, min(job.num_fetched_tokens, most - held)) if self._costs.fetch_s_per_token else 0
        job.hits = {"gpu": held - from_host, "cpu": from_host, "peer": fetched}
        job.num_computed = held + fetched
        return from_host * self._costs.host_s_per_token + fetched * self._costs.fetch_s_per_token

    def _measure(self, seconds: float, num_tokens: int) -> None:
        if num_tokens >= 256:
            self._prefill_rate.measured(num_tokens, seconds)
