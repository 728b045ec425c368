"""A node that takes time but computes nothing: steps by a cost model, blocks in two LRU tiers. Pure: virtual time.

It works as a unified node does: each step takes all running decodes and up to a chunk of the prompts that came first.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.rate import Rate


@dataclass(frozen=True)
class CostModel:
    """The costs of a node's work in seconds. The defaults are those of an 8B model in bf16 on one H200:
    docs/measurements.md."""

    prefill_s_per_token: float = 1 / 44_000  # without context
    prefill_s_per_token_and_context: float = 1 / 44_000 / 33_000  # attention is as much again at 33k tokens of context
    step_s: float = 0.0045  # of a step, whatever is in it: weights are read once
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

    @property
    def num_left(self) -> int:
        return self.request.num_prompt_tokens - self.num_computed


class TieredCache:
    """Blocks of a node: what leaves the GPU tier goes to the host tier, what leaves that is gone. Least recently used
    first; of one request the deepest first. A block is in one tier."""

    def __init__(self, num_gpu_blocks: int, num_host_blocks: int) -> None:
        self._gpu: OrderedDict[bytes, None] = OrderedDict()
        self._host: OrderedDict[bytes, None] = OrderedDict()
        self._num_gpu, self._num_host = num_gpu_blocks, num_host_blocks
        self.events: list[BlockEvent] = []

    def drain_events(self) -> list[BlockEvent]:
        """What the directory is to hear of, since the last call."""
        events, self.events = self.events, []
        return events

    def match(self, hashes: Sequence[bytes]) -> tuple[int, int]:
        """Returns how many leading blocks are here, and how many of these are in the host tier."""
        length = in_host = 0
        for block_hash in hashes:
            if block_hash in self._host:
                in_host += 1
            elif block_hash not in self._gpu:
                break
            length += 1
        return length, in_host

    def use(self, hashes: Sequence[bytes]) -> None:
        """Puts all of them into the GPU tier, the first as the most recent."""
        for block_hash in reversed(hashes):
            if block_hash in self._gpu:
                self._gpu.move_to_end(block_hash)
                continue
            self._gpu[block_hash] = None
            self.events.append(BlockEvent(block_hash, True, "gpu"))
            if block_hash in self._host:
                del self._host[block_hash]
                self.events.append(BlockEvent(block_hash, False, "cpu"))
        while len(self._gpu) > self._num_gpu:
            block_hash, _ = self._gpu.popitem(last=False)
            self.events.append(BlockEvent(block_hash, False, "gpu"))
            if self._num_host:
                self._host[block_hash] = None
                self.events.append(BlockEvent(block_hash, True, "cpu"))
        while len(self._host) > self._num_host:
            self.events.append(BlockEvent(self._host.popitem(last=False)[0], False, "cpu"))

    def check_integrity(self) -> None:
        assert len(self._gpu) <= self._num_gpu
        assert len(self._host) <= self._num_host
        assert not self._gpu.keys() & self._host.keys()


class SimulatedNode:
    """`submit` jobs; when `next_at` is reached call `advance`. Both return nothing; `done` collects finished jobs."""

    def __init__(self, node_id: str, costs: CostModel, gpu_tokens: int, host_tokens: int) -> None:
        self.node_id = node_id
        self.next_at = math.inf
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
        return waiting + sum(job.num_left for job in self._prefilling)

    @property
    def num_free_blocks(self) -> int:
        return max(0, self.num_blocks - self._context // TRACE_BLOCK)

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds that a prompt token takes, as measured in steps; 0 before the first."""
        return self._prefill_rate.seconds

    # --- events -----------------------------------------------------------------------------------------------

    def submit(self, job: Job, now: float) -> None:
        self._waiting.append(job)
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
        self.cache.use(job.hashes)
        num_more = job.request.num_output_tokens - 1
        if not num_more:
            self._finish(job, now)
            return
        self._num_jobs += 1
        self._context += job.request.num_prompt_tokens
        heapq.heappush(self._decoding, (self._num_steps + num_more, self._num_jobs, job))

    def _finish(self, job: Job, now: float) -> None:
        job.finished_at = now
        self.done.append(job)

    def _start(self, now: float) -> None:
        prompt_s = self._plan_prompts()
        costs, rows = self._costs, len(self._decoding)
        if not prompt_s and not rows:
            self.next_at = math.inf
            return
        step_s = costs.step_s + rows * costs.sequence_s + self._context * costs.context_s_per_token
        if prompt_s:
            step_s += prompt_s
            self.busy_s += step_s
            self.prefill_s += prompt_s
            self.next_at = now + step_s
            return
        num_steps = max(1, self._decoding[0][0] - self._num_steps)
        self._run = now, step_s, num_steps
        self.next_at = now + num_steps * step_s

    def _plan_prompts(self) -> float:
        """Seconds of the prompt work in the next step."""
        costs, budget, seconds = self._costs, self._costs.chunk, 0.0
        while budget and (self._prefilling or self._admit()):
            job = self._prefilling[0]
            if not job.num_computed:
                seconds += self._look_up(job)
            num_tokens = min(budget, job.num_left)
            middle = job.num_computed + num_tokens / 2
            part_s = num_tokens * (costs.prefill_s_per_token + costs.prefill_s_per_token_and_context * middle)
            self._measure(part_s, num_tokens)
            seconds += part_s
            job.num_computed += num_tokens
            budget -= num_tokens
            if not job.num_left:
                self._ending.append(self._prefilling.popleft())
        return seconds

    def _admit(self) -> bool:
        if not self._waiting or self.num_running >= self._costs.max_num_seqs:
            return False
        if self._decoding and self.num_free_blocks * TRACE_BLOCK < self._waiting[0].request.num_prompt_tokens:
            return False
        self._prefilling.append(self._waiting.popleft())
        return True

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
