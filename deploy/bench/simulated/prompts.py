"""The prompts of a simulated node: who is next, what the cache holds of them, what a chunk takes. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tandem.deploy.bench.simulated.cache import TieredCache
from tandem.deploy.bench.simulated.costs import CONTEXT, SIZES, CostModel
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.trace import TRACE_BLOCK
from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.prompt_order import ArrivalOrder, PromptOrder, SlackOrder
from tandem.engine.scheduling.times.step_sizes import StepSizes
from tandem.kv_connector.pulls.chunks import LEAST_TOKENS, MOST_TOKENS, divide
from tandem.kv_connector.tiers.ways import WAY_S

BLOCK = 16  # tokens, in which chunks of a prompt end that several nodes compute


@dataclass
class PromptWork:
    """The prompt work of one step."""

    seconds: float = 0.0
    num_tokens: int = 0
    begun: list[Job] = field(default_factory=list)
    chunks: list[tuple[Job, int]] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class Prompts:
    """Orders them as nodes do: by deadline on a prefill node and where a time a token is promised, else by arrival."""

    def __init__(
        self,
        node_id: str,
        role: str,
        costs: CostModel,
        cache: TieredCache,
        clock: StepClock,
        options: SchedulerOptions,
    ) -> None:
        self._node_id = node_id
        self._costs, self._cache, self._clock, self._options = costs, cache, clock, options
        self._sizes = StepSizes()
        self._sizes.measured(costs.table(SIZES, CONTEXT))
        has_deadlines = role == "prefill" or options.tpot_target_ms > 0
        order = SlackOrder(options.ttft_target_ms / 1e3, clock) if has_deadlines else ArrivalOrder()
        self._order: PromptOrder = order
        self._passes = has_deadlines  # who has room passes who has none
        self._waiting: list[Job] = []
        self._begun: list[Job] = []
        self._ready_at: dict[Job, float] = {}  # of those that take all blocks at once: when what goes is saved

    def __iter__(self) -> Iterator[Job]:
        yield from self._begun
        yield from self._waiting

    def __len__(self) -> int:
        return len(self._begun) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens without KV: of waiting prompts all, for nobody has looked yet what the cache holds of them."""
        return sum(job.num_own_tokens for job in self)

    @property
    def next_at(self) -> float:
        """When what a prompt pushes out is saved, so that it may be computed; infinite: none waits for that."""
        now = self._clock.now()
        return min((ready_at for ready_at in self._ready_at.values() if ready_at > now), default=math.inf)

    def due(self) -> list[tuple[float, int]]:
        """Says of each prompt when its first token is due, and how many tokens this node will compute of it."""
        if not isinstance(self._order, SlackOrder):
            return [(0.0, job.num_own_tokens) for job in self if job.num_left]
        found = []
        for job in self:
            if job.num_left:
                cached = 0 if job.hits or job in self._begun else self._num_cached(job)
                found.append((self._order.deadline(job), max(1, job.num_own_tokens - cached)))  # type: ignore[arg-type]
        return found

    def arrived(self, job: Job) -> None:
        if job.num_nodes > 1 and not job.hits:  # the first of its nodes looks for all of them
            self._look_up(job)
        self._waiting.append(job)
        self._order.arrived(job)  # type: ignore[arg-type]
        self.join(job)

    def plan(self, budget: int, has_room: Callable[[Job], bool], num_rows: int) -> PromptWork:
        """The next step's work, of at most `budget` tokens beside so many rows; it counts as computed."""
        work = PromptWork()
        for job in [job for job in self if job.is_over_at(self._node_id)]:  # the rest of it is others'
            self._drop(job)
            self._cache.let_go(job)
        arranged = self._arranged()
        chunk = self._options.contended_prefill_chunk
        if chunk and (len(arranged) > 1 or self._order.has_late):
            budget = min(budget, chunk)
        room = budget = self._sizes.cut(budget, num_rows, (job.num_left for job in arranged))
        for job in arranged:
            if budget <= 0:
                break
            if not job.chunk_for(self._node_id):
                continue
            if job not in self._begun and not self._cache.is_held_by(job) and not has_room(job):
                if not self._passes:
                    break
                continue
            if self._takes_all(job) and not self._is_ready(job):
                continue
            if job not in self._begun:
                self._begin(job, work, room)
            budget -= self._compute(job, budget, work)
        work.seconds += self._costs.prompts_s([(job.num_computed - num, num) for job, num in work.chunks])
        self._order.launched(work.chunks)  # type: ignore[arg-type]
        return work

    def _begin(self, job: Job, work: PromptWork, room: int) -> None:
        self._waiting.remove(job)
        self._begun.append(job)
        work.begun.append(job)
        if not job.hits:
            self._look_up(job)
        if job.has_help and job.table is None:
            most = min(MOST_TOKENS, max(room, LEAST_TOKENS))
            job.table = divide(job.num_computed, job.num_prompt_tokens, job.num_nodes, most, BLOCK)
            job.places = job.places if job.table is not None else job.places[:1]
        if job.is_had_by(self._node_id):
            self._cache.touch(job.hashes)
            self._hold(job, job.num_computed)
        # What one of several nodes found is pushed to each of the others.
        work.seconds += job.loading_s or job.num_found * self._costs.push_s_per_token * (job.num_nodes > 1)
        job.loading_s = 0.0

    def _compute(self, job: Job, budget: int, work: PromptWork) -> int:
        num_tokens = min(budget, job.chunk_for(self._node_id))
        work.num_tokens += num_tokens
        work.chunks.append((job, num_tokens))
        job.num_computed += num_tokens
        if job.table is None:
            self._hold(job, job.num_computed)
        if not job.num_left:
            self._drop(job)
            work.ended.append(job)
        return num_tokens

    def join(self, job: Job) -> None:
        """Takes, at once, all blocks of this node's share of a prompt that has begun elsewhere."""
        if job in self._waiting and job.table is not None and not job.is_had_by(self._node_id):
            last = job.table.of(job.places.index(self._node_id))[-1]
            self._take_at_once(job, -(-job.table.ends[last] // TRACE_BLOCK))

    def _takes_all(self, job: Job) -> bool:
        """Whether a prompt takes all its blocks at its start: one of several nodes, and one that is handed over."""
        return job.has_help or job.decode_on not in ("", self._node_id)

    def _is_ready(self, job: Job) -> bool:
        """Whether what a prompt pushes out at its start is saved. Takes its blocks when it is asked first."""
        if job not in self._ready_at:
            if not job.hits:
                self._look_up(job)
            self._cache.touch(job.hashes)
            self._take_at_once(job, self._num_blocks(job, job.num_prompt_tokens))
        return self._ready_at[job] <= self._clock.now()

    def _take_at_once(self, job: Job, num_blocks: int) -> None:
        if job not in self._ready_at:
            block_s = TRACE_BLOCK * self._costs.host_s_per_token
            num_saved = self._cache.hold(job, num_blocks, int(WAY_S / max(1e-9, block_s)))
            self._ready_at[job] = self._clock.now() + num_saved * block_s

    def _hold(self, job: Job, num_tokens: int) -> None:
        self._cache.hold(job, self._num_blocks(job, num_tokens))

    def _num_blocks(self, job: Job, num_tokens: int) -> int:
        """How many blocks so many tokens of it have, but for those that it found on the device."""
        return -(-num_tokens // TRACE_BLOCK) + -job.hits["gpu"] // TRACE_BLOCK

    def _drop(self, job: Job) -> None:
        self._ready_at.pop(job, None)
        (self._begun if job in self._begun else self._waiting).remove(job)
        self._order.ended(job)  # type: ignore[arg-type]

    def _arranged(self) -> Sequence[Job]:
        arranged = self._order.arrange(self._begun, self._waiting, self._num_cached)  # type: ignore[arg-type]
        return arranged  # type: ignore[return-value]

    def _num_cached(self, job: Job) -> int:
        return min(TRACE_BLOCK * self._cache.match(job.hashes)[0], job.num_prompt_tokens - 1)

    def _look_up(self, job: Job) -> None:
        """Sets what need not be computed, and the seconds that it takes to get it."""
        num_blocks, in_host = self._cache.match(job.hashes)
        most = job.num_prompt_tokens - 1
        held = min(num_blocks * TRACE_BLOCK, most)
        from_host = min(in_host * TRACE_BLOCK, held)
        at_peer = TRACE_BLOCK * job.peer.match(job.hashes)[0] if job.peer is not None else 0
        fetched = max(0, min(at_peer, most) - held)
        job.hits = {"gpu": held - from_host, "cpu": from_host, "peer": fetched}
        job.num_computed = job.num_found = held + fetched
        job.loading_s = from_host * self._costs.host_s_per_token + fetched * self._costs.fetch_s_per_token
