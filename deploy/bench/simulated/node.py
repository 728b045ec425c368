"""A node that takes time but computes nothing: steps by a cost model, blocks in two LRU tiers. Pure: virtual time.

Each step has all running decodes and as much prompt work as the product's own `PromptBudget` allows beside them. A
prompt that decodes elsewhere is handed over when it is computed; on a node of role "prefill" all of them are.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

from tandem.deploy.bench.simulated.cache import TieredCache
from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.handoffs import Grants, Link
from tandem.deploy.bench.simulated.job import Job, StepCount
from tandem.deploy.bench.simulated.prompts import Prompts
from tandem.deploy.bench.trace import TRACE_BLOCK
from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.times.prompt_budget import PromptBudget
from tandem.engine.scheduling.times.step_times import StepTimes

TTFT_S = 0.3  # what nodes promise that were told nothing: engine/contracts/config.py
ITL_S = 0.006  # of decode nodes without a promised time a token: node/setup.py


def options_of(role: str, targets: Targets, max_num_batched_tokens: int) -> SchedulerOptions:
    """What a GPU node's options come to: node/setup.py."""
    tpot_ms = 1e3 * targets.tpot_s
    itl_s = targets.itl_max_s or (ITL_S if role == "decode" and not tpot_ms else 0.0)
    return SchedulerOptions(
        max_num_batched_tokens=max_num_batched_tokens,
        contended_prefill_chunk=2048 if role == "prefill" or tpot_ms else 0,
        ttft_target_ms=round(1e3 * (targets.ttft_s or TTFT_S)),
        tpot_target_ms=tpot_ms,
        itl_max_ms=1e3 * itl_s,
        decode_prompt_budget=0 if itl_s or tpot_ms else 2048,
    )


class SimulatedNode:
    """`submit` jobs, `take` those whose KV is here; when `next_at` is reached call `advance`. `done` collects finished
    jobs, `computed` prompts that are to be handed over."""

    def __init__(
        self,
        node_id: str,
        costs: CostModel,
        gpu_tokens: int,
        host_tokens: int,
        targets: Targets = NO_TARGETS,
        role: str = "unified",
        claim: Callable[[Job, float], None] = lambda job, now: None,
        is_left: Callable[[str, bytes], bool] = lambda node_id, block_hash: False,
    ) -> None:
        """`claim` is called as a prompt begins that will be handed over; `is_left` says whether the node of that id may
        leave a block to a peer."""
        self.node_id, self.role = node_id, role
        self.next_at = math.inf
        self.busy_s = self.prefill_s = 0.0
        self.loaded_s = 0.0  # busy until the last request came: then long answers run on alone
        self.done: list[Job] = []
        self._passed_on: list[Job] = []
        self.computed: list[Job] = []
        self.cache = TieredCache(gpu_tokens // TRACE_BLOCK, host_tokens // TRACE_BLOCK, partial(is_left, node_id))
        self.num_blocks = gpu_tokens // TRACE_BLOCK
        self._context = 0
        self.link, self.grants = Link(costs), Grants(lambda: gpu_tokens - self._context)
        self._now = 0.0
        self._costs, self._claim = costs, claim
        options = options_of(role, targets, costs.max_num_batched_tokens)
        self._targets = Targets(targets.ttft_s, targets.tpot_s, options.itl_max_ms / 1e3)
        self._clock = StepClock(lambda: self._now, by_size=False)
        self._times = StepTimes()
        self._times.measured(costs.table())
        self._budget = PromptBudget(options, TRACE_BLOCK, self._clock, self._times)
        self._prompts = Prompts(node_id, role, costs, self.cache, self._clock, options)
        self._ending: list[Job] = []  # prompts that the step under way completes
        self._has_prompts: tuple[int, int] | None = None  # that step's sequences and prompt tokens
        self._may_wait = False  # whether it is also for other nodes
        self._decoding: list[tuple[int, int, Job]] = []  # heap by the step that makes the last token
        self._resuming: list[Job] = []  # handed over, without a slot
        self._steps = StepCount()
        self._num_jobs = 0
        self._run = (0.0, 0.0, 0)  # of decode steps alone: began at, seconds of one, how many; 0: a step with prompts
        self.gaps: Counter[float] = Counter()  # seconds between two tokens of its streams, hand-overs aside

    # --- what a Status tells ----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self._decoding) + self._prompts.num_begun

    @property
    def num_waiting(self) -> int:
        return self._prompts.num_waiting + len(self._resuming)

    @property
    def num_waiting_tokens(self) -> int:
        return self._prompts.num_tokens

    @property
    def num_free_blocks(self) -> int:
        return max(0, self.num_blocks - self._context // TRACE_BLOCK - self.cache.num_held)

    @property
    def num_streams(self) -> int:
        return len(self._decoding) + len(self._resuming)

    @property
    def decode_s(self) -> float:
        """Seconds of a step of its streams alone."""
        return self._costs.decode_s(len(self._decoding), self._context)

    def free_s(self, now: float) -> float:
        """Seconds until the step that runs has ended; of decodes alone it makes room for prompts sooner."""
        return max(0.0, self.next_at - now) if self._has_prompts is not None else 0.0

    def prompts_due(self, now: float) -> tuple[tuple[float, int], ...]:
        """Says of each prompt in how many seconds its first token is due, and what is left here to compute of it."""
        return tuple((at - now, num_tokens) for at, num_tokens in self._prompts.due())

    def num_held(self, job: Job) -> int:
        """Tokens of a prompt that its cache holds."""
        return min(job.num_prompt_tokens, TRACE_BLOCK * self.cache.match(job.hashes)[0])

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds that a prompt token takes, beside the decodes that run now; 0 before the first was measured."""
        if self.role == "prefill" or not self._clock.seconds_per_token:
            return self._clock.seconds_per_token
        return self._budget.s_per_token(self._streams())  # type: ignore[arg-type]

    # --- events -----------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        """Takes a prompt to compute."""
        self._now = now
        self._num_jobs += 1
        job.order, job.targets = self._num_jobs, self._targets
        self._prompts.arrived(job)
        self._interrupt(now)

    def take(self, job: Job, now: float) -> None:
        """Takes a computed prompt over, whose KV is here by now."""
        self._now = now
        job.targets = self._targets
        self.cache.let_go(("granted", job))
        self.cache.use(job.hashes)
        self._resuming.append(job)
        self._interrupt(now)

    def passed_on(self) -> list[Job]:
        """The prompts of which chunks have begun here since the last call: it is another node's turn."""
        found, self._passed_on = self._passed_on, []
        return found

    def nudge(self, job: Job, now: float) -> None:
        """Notes that it may be this node's turn with a prompt."""
        if self._prompts:
            self._now = now
            self._prompts.join(job)
            self._interrupt(now)

    def arrivals_ended(self, now: float) -> None:
        """Notes that nothing more will be placed on any node."""
        began, _, num_steps = self._run
        self.loaded_s = self.busy_s + (now - began if num_steps else 0.0)

    def advance(self) -> list[Job]:
        """Ends the step, or run of decode steps, that is under way. Returns the jobs that have their first token by
        it."""
        now, (began, step_s, num_steps) = self.next_at, self._run
        self._now = now
        if num_steps:
            self.busy_s += num_steps * step_s
            self._run = began, step_s, 0
        self.gaps[step_s if num_steps else now - began] += max(1, num_steps) * len(self._decoding)
        self._steps.num += max(1, num_steps)
        self._context += max(1, num_steps) * len(self._decoding)
        if self._has_prompts is not None:
            num_rows, num_tokens = self._has_prompts
            seconds = self._clock.completed(self._steps.num, self._may_wait)
            if not self._may_wait:
                self._times.observed(num_rows + num_tokens, seconds)
            self._has_prompts = None
        while self._decoding and self._decoding[0][0] <= self._steps.num:
            job = heapq.heappop(self._decoding)[2]
            self._context -= job.num_prompt_tokens + job.request.num_output_tokens - 1
            self._finish(job, now)
        for job in self._ending:
            self._first_token(job, now)
        ended, self._ending = self._ending, []
        self._start(now)
        return ended

    def check_integrity(self) -> None:
        """Says whether the books agree when no step is under way."""
        self.cache.check_integrity()
        assert self._context == sum(
            job.num_prompt_tokens + job.request.num_output_tokens - 1 - (end - self._steps.num)
            for end, _, job in self._decoding
        ), "context is miscounted"

    # --- steps ------------------------------------------------------------------------------------------------

    def _interrupt(self, now: float) -> None:
        """Lets what came join after the step under way, of several decode steps one after the other."""
        if not self._run[2] and self._has_prompts is None:
            idle_s = now - self._run[0]
            self.cache.save(int(idle_s / max(1e-9, self._costs.host_s_per_token) / TRACE_BLOCK))
            self._start(now)
        elif self._run[2] > 1:
            began, step_s, _ = self._run
            num_steps = max(1, math.ceil((now - began) / step_s - 1e-9))
            self._run = began, step_s, num_steps
            self.next_at = began + num_steps * step_s

    def _streams(self) -> list[Job]:
        return [job for _, _, job in self._decoding]

    def _first_token(self, job: Job, now: float) -> None:
        job.first_token_at = now
        self.cache.let_go(job)
        self.cache.use(job.hashes)
        if job.request.num_output_tokens == 1:
            self._finish(job, now)
        elif job.decode_on and job.decode_on != self.node_id:
            job.computed_at = now
            self.computed.append(job)
        else:
            self._decode(job)

    def _decode(self, job: Job) -> None:
        self.grants.taken(job)
        job.steps, job.last_step = self._steps, self._steps.num + job.request.num_output_tokens - 1
        self._context += job.num_prompt_tokens
        self._num_jobs += 1
        heapq.heappush(self._decoding, (job.last_step, self._num_jobs, job))

    def _finish(self, job: Job, now: float) -> None:
        job.finished_at = now
        self.cache.touch(job.hashes)
        self.done.append(job)

    def _start(self, now: float) -> None:
        while self._resuming and len(self._decoding) < self._costs.max_num_seqs:
            self._decode(self._resuming.pop(0))
        rows = len(self._decoding)
        step_s = self._costs.decode_s(rows, self._context)
        budget = self._num_prompt_tokens()
        work = self._prompts.plan(budget, self._has_room, rows) if budget else None
        if work is None or not work.num_tokens:
            num_steps = 1 if self._prompts and rows else max(1, self._decoding[0][0] - self._steps.num) if rows else 0
            self._run = now, step_s, num_steps
            self.next_at = now + num_steps * step_s if num_steps else self._prompts.next_at
            return
        self._run = now, 0.0, 0
        self._budget.had()
        self._may_wait = any(job.has_help for job, _ in work.chunks)
        self._clock.launched(self._steps.num + 1, rows + work.num_tokens, work.num_tokens)
        self.link.pushed_with(work, now)
        for job in work.begun:
            if job.decode_on and not job.has_claimed:
                job.has_claimed = True
                self._claim(job, now)
        self._ending, self._has_prompts = work.ended, (rows, work.num_tokens)
        step_s += work.seconds
        self.busy_s += step_s
        self.prefill_s += work.seconds
        self.next_at = now + step_s
        ends_at = max([self.next_at, *(self._follows_at(job, num_tokens) for job, num_tokens in work.chunks)])
        self.busy_s += ends_at - self.next_at
        self.next_at = ends_at
        for job, _ in work.chunks:
            job.chunk_ends_at = ends_at
        self._passed_on += [job for job, _ in work.chunks if job.has_help]

    def _follows_at(self, job: Job, num_tokens: int) -> float:
        """When a chunk of a shared prompt can have ended: each layer waits for that of the chunk before it."""
        if job.num_nodes == 1:
            return 0.0
        return job.chunk_ends_at + self._costs.lag_s(job.num_computed - num_tokens, num_tokens)

    def _num_prompt_tokens(self) -> int:
        if not self._prompts:
            return 0
        if not self._decoding:
            return self._costs.max_num_batched_tokens
        beside = self._budget.beside(self._streams(), self._prompts)  # type: ignore[arg-type]
        return min(self._costs.max_num_batched_tokens - len(self._decoding), beside)

    def _has_room(self, job: Job) -> bool:
        if self.num_running >= self._costs.max_num_seqs:
            return False
        return not self._decoding or self.num_free_blocks * TRACE_BLOCK >= job.num_prompt_tokens
