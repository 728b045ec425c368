"""Who computes how many tokens in the next step: budgets, order, preemption, admission.

A plan is provisional until it is built (`engine/scheduling/builder.py`): whoever is preempted while others are planned
loses its row too. What is sure at once is block ownership: rows are planned only for requests that hold their blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tandem.engine.blocks.reservations import Kind
from tandem.engine.blocks.window import NO_WINDOW
from tandem.engine.process.process_log import RateLimited
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.prompt_order import Aging, who_gives_way
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.times.prompt_budget import PromptBudget

limited = RateLimited(logging.getLogger(__name__))

FEW_BLOCKS = 8  # a chunk of more need not end with a block; a guess
# Waiting requests that may be passed by in one step because they wait for something else than room; bounds its time.
MAX_PASSED_BY = 256  # a guess
# How long a request waits for a slot for its adapter before others must wait behind it; a guess.
ADAPTER_PATIENCE_S = 1.0


class PlannedRow(msgspec.Struct, frozen=True, gc=False):
    """What one request computes in the planned step. The connector brings `num_external_tokens` beyond local hits."""

    num_tokens: int
    is_prompt: bool
    is_new: bool  # enters its slot with this row
    num_external_tokens: int = 0
    num_skipped_tokens: int = 0  # before its own: others compute them, into blocks of this request
    drafts: tuple[int, ...] = ()  # guesses for the tokens behind, each to be checked by a row of its own


@dataclass(slots=True)
class StepPlan:
    """The rows of a step that is being planned. `budget` and `prompt_budget` are what is left of them, in tokens."""

    budget: int
    prompt_budget: int
    prompt_room: int = 0  # what all prompts together may have of the step
    rows: dict[Request, PlannedRow] = field(default_factory=dict)
    preempted: bool = False

    def put(self, request: Request, row: PlannedRow) -> None:
        self._charge(row, row.num_tokens)
        self.rows[request] = row

    def drop(self, request: Request) -> None:
        row = self.rows.pop(request, None)
        if row is not None:
            self._charge(row, -row.num_tokens)

    def put_drafts(self, request: Request, drafts: tuple[int, ...]) -> None:
        """Gives a decode row drafts. To be called last: nobody is preempted any more."""
        self.rows[request] = msgspec.structs.replace(self.rows[request], drafts=drafts)
        self.budget -= len(drafts)

    def _charge(self, row: PlannedRow, num_tokens: int) -> None:
        self.budget -= num_tokens
        if row.is_prompt:
            self.prompt_budget -= num_tokens

    @property
    def num_prompt_tokens_left(self) -> int:
        return max(0, min(self.budget, self.prompt_budget))


@dataclass(slots=True)
class Admission:
    """How far one plan has come with the requests that wait."""

    is_open: bool = True
    num_passed_by: int = 0
    num_reserved: int | None = None  # blocks that requests in the batch will need, counted when first asked for


def is_decoding(request: Request) -> bool:
    """Whether only its newest token is left to compute. A sequence that recomputes its output is prompt work."""
    return request.num_computed_tokens >= request.num_prompt_tokens and request.num_uncomputed_tokens <= 1


def takes_all(request: Request) -> bool:
    """Whether it takes the blocks of all its tokens as it starts: what several nodes compute comes into them, and a
    prompt to be handed off never waits for a block half way, see `StepPlanner._preemptable`."""
    return request.has_help or request.prompt.mode == "prefill"


class StepPlanner:
    """Changes queues, slots and block lists through `state`; progress and in-flight counts are the builder's."""

    def __init__(self, state: SchedulerState) -> None:
        self._state, self._queues = state, state.queues
        self._options = state.options
        self._kv = state.kv
        self._aging = Aging(state.clock.now)
        self._budget = PromptBudget(state.options, state.block_size, state.clock, state.step_times)

    def plan(self, nothing_in_flight: bool) -> StepPlan:
        """Plans the next step. `nothing_in_flight`: no launched step is unread, so nothing but this plan can change
        what is stuck."""
        plan = StepPlan(self._options.max_num_batched_tokens, self._options.max_num_batched_tokens)
        self._kv.slide(self._queues.running)
        for request in self._aging.due(self._queues.waiting):
            self._queues.put_first(request)
        for request in [r for r in self._queues.running if r.can_advance and is_decoding(r)]:
            if request.state is RequestState.RUNNING:
                self._plan_decode(plan, request)
        self._resume_committed(plan)
        self._plan_prompts(plan)
        if not plan.rows and nothing_in_flight:
            self._unlock()
        return plan

    def prompt_s_per_token(self) -> float:
        """Seconds that a token of the next prompt would take beside the decodes that run now; without measured step
        times the seconds that such tokens took lately; 0: not known."""
        if not self._state.step_times.are_measured or not self._state.limits_prompt_work:
            return self._state.clock.seconds_per_token
        return self._budget.s_per_token([request for request in self._queues.running if is_decoding(request)])

    # --- requests in the batch ------------------------------------------------------------------------------

    def _plan_decode(self, plan: StepPlan, request: Request) -> None:
        if plan.budget and self._make_room(plan, request, request.num_launched_tokens):
            plan.put(request, PlannedRow(1, is_prompt=False, is_new=request.has_stale_slot))

    def _plan_chunk(self, plan: StepPlan, request: Request) -> None:
        row = self._chunk(plan, request, is_new=False)
        end = request.num_computed_tokens + row.num_skipped_tokens + row.num_tokens
        if row.num_tokens and self._make_room(plan, request, end):
            plan.put(request, row)

    def _chunk(self, plan: StepPlan, request: Request, is_new: bool, num_external_tokens: int = 0) -> PlannedRow:
        """The row of the next chunk, within budget and chunk limit. A chunk of few blocks ends on a block boundary,
        unless it is the last or the limit is below a block; what that leaves of a long one's step would be padding."""
        start, end = request.num_computed_tokens, request.num_launched_tokens
        if request.has_help:
            start, end = self._state.shares.next_part(request, plan.prompt_room) or (start, start)
        todo, size = end - start, self._state.block_size
        limit = min(plan.num_prompt_tokens_left, self._options.max_prefill_chunk or todo)
        num_tokens = min(todo, limit)
        if size <= limit < min(todo, FEW_BLOCKS * size) and (start + limit) // size * size > start:
            num_tokens = (start + limit) // size * size - start
        return PlannedRow(num_tokens, True, is_new, num_external_tokens, start - request.num_computed_tokens)

    def _make_room(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Gets blocks for `num_tokens` tokens, if need be by preempting less important requests. False: not in this
        step. `request` then keeps what it has; if that hinders a more important one it will be preempted in turn."""
        if self._outgrew_pool(plan, request, num_tokens):
            return False
        while not self._kv.grow(request, num_tokens):
            victim = max(self._preemptable(), key=lambda r: r.sort_key, default=request)
            if victim.sort_key <= request.sort_key:
                return False
            self._preempt(plan, victim)
        return True

    def _preempt(self, plan: StepPlan, victim: Request) -> None:
        plan.drop(victim)
        plan.preempted = True
        self._state.preempt(victim)

    def _outgrew_pool(self, plan: StepPlan, request: Request, num_tokens: int) -> bool:
        """Whether `request` needs more blocks than there are; then it has failed."""
        if self._kv.num_blocks_for(num_tokens) <= self._kv.most_blocks:
            return False
        text = f"the sequence outgrew the pool of {self._state.pool.num_blocks} KV blocks"
        for sequence in self._state.fail(request, "too_large_for_pool", text):
            plan.drop(sequence)
        return True

    def _preemptable(self) -> list[Request]:
        """Requests that hold blocks, but not those that are being handed off, or that several nodes compute: transfers
        may read their blocks, and they need no more than they have."""
        holders = [r for r in (*self._queues.running, *self._queues.waiting) if r.block_ids]
        return [r for r in holders if r.prompt.mode != "prefill" and not (r.is_paused or r.has_help)]

    # --- prompts, begun and waiting -------------------------------------------------------------------------

    def _plan_prompts(self, plan: StepPlan) -> None:
        started = [r for r in self._queues.running if r not in plan.rows and r.can_advance and not is_decoding(r)]
        waiting = self._queues.waiting
        if plan.preempted or not waiting or not self._may_have_slot(waiting[0]):  # nor may any after it
            waiting = []
        waiting = [
            r
            for r in self._with_adapters(waiting)
            if not ((r.block_ids and not r.has_help) or r.candidates) and self._may_have_slot(r)
        ]
        if plan.rows and (started or waiting) and self._state.limits_prompt_work:
            plan.prompt_budget = self._budget.beside(plan.rows, (*started, *waiting))
        arranged = self._state.prompt_order.arrange(started, waiting, self._state.kv.num_cached_tokens)
        chunk = self._options.contended_prefill_chunk
        # A long step would make the next prompt to come wait; and a prompt that is late anyway needs no long steps.
        if chunk and (len(arranged) > 1 or self._state.prompt_order.has_late):
            plan.prompt_budget = min(plan.prompt_budget, chunk)
        plan.prompt_budget = self._in_whole_waves(plan, arranged)
        plan.prompt_room = plan.num_prompt_tokens_left
        admission = Admission()
        for request in arranged:
            if request.state is RequestState.RUNNING:
                self._plan_chunk(plan, request)
            elif request.state is not RequestState.FINISHED:
                self._admit_contained(plan, request, admission)
        if arranged and any(row.is_prompt for row in plan.rows.values()):
            self._budget.had()

    def _in_whole_waves(self, plan: StepPlan, prompts: Sequence[Request]) -> int:
        """The prompt budget, less where there is more to compute than it and a smaller step is faster by the token."""
        budget, num_planned = plan.num_prompt_tokens_left, self._options.max_num_batched_tokens - plan.budget
        cut_to = self._state.step_sizes.cut(budget, num_planned, map(self._state.kv.num_left, prompts))
        return cut_to if cut_to < budget else plan.prompt_budget

    def _resume_committed(self, plan: StepPlan) -> None:
        """Starts a request that holds its KV already, before all others: it needs a slot and at most one block."""
        for request in [r for r in self._with_adapters(self._queues.waiting) if r.block_ids and not r.has_help]:
            if not self._may_have_slot(request) or plan.budget < 1:
                return
            if self._queues.adapters.may_take(request.prompt.adapter) and self._kv.grow(request, request.num_tokens):
                self._take_slot(plan, request)
                plan.put(request, PlannedRow(1, is_prompt=False, is_new=True))

    def _admit_contained(self, plan: StepPlan, request: Request, admission: Admission) -> None:
        """Admits a request. An exception that nobody expected costs it alone if no block, slot or row has changed
        hands; else nobody knows what holds, and the process must end."""
        num_free, num_rows = self._state.pool.num_free, len(plan.rows)
        try:
            self._admit(plan, request, admission)
        except Exception:
            is_untouched = request.slot < 0 and not request.block_ids and len(plan.rows) == num_rows
            if not is_untouched or self._state.pool.num_free != num_free:
                raise
            text, name = "request %s attempt %d can't be planned", request.key
            limited.exception(text, *name, key="plan", request_id=name.request_id)
            self._state.give_up(request, "the node can't plan this request; its log says why")

    def _admit(self, plan: StepPlan, request: Request, admission: Admission) -> None:
        """Starts a waiting request while budget, slots and blocks last. One that waits for its connector or for its
        own tokens in flight is passed by; one that lacks blocks holds the line, or large ones would never start, but
        not those that others wait for elsewhere."""
        may_start = not plan.preempted and self._may_have_slot(request) and plan.num_prompt_tokens_left
        if not may_start or not self._queues.adapters.may_take(request.prompt.adapter):  # others have taken the last
            return
        if request.block_ids:  # a share of another node's prompt, which lacks no room
            self._start_share(plan, request, admission)
            return
        if not ((admission.is_open and admission.num_passed_by < MAX_PASSED_BY) or self._is_granted(request)):
            return
        admission.num_passed_by += request.num_in_flight > 0
        if request.num_in_flight or self._outgrew_pool(plan, request, request.num_tokens):  # it may have held all
            return
        if admission.num_reserved is None:
            admission.num_reserved = self._num_reserved()
        hits = self._kv.cached_prefix(request)
        needed = self._kv.num_future_blocks(request, len(hits)) + admission.num_reserved
        needed_hits = self._kv.needed_hits(request, hits)
        has_room = self._state.pool.reservations.make_room(needed, self._kind_of(request), request, needed_hits)
        if not has_room and request.has_help and self._state.pool.window != NO_WINDOW:
            request.go_alone()  # it need not keep what slides out then
            self._admit(plan, request, admission)
        elif not has_room and not self._take_blocks(plan, request, hits):
            admission.is_open = False
        elif self._start(plan, request, hits):
            admission.num_reserved += self._kv.num_future_blocks(request)
        else:
            admission.num_passed_by += 1

    def _start(self, plan: StepPlan, request: Request, hits: list[int]) -> bool:
        """Starts a waiting request; False when it must wait for its connector, for a load, or until what it pushes out
        is saved."""
        num_hit = len(hits) * self._state.block_size
        num_external = self._ask_connector(request, num_hit)
        num_loaded = self._ask_tiers(plan, request, hits, num_external)
        if num_external is None or num_loaded is None or not self._kv.start(request, hits, num_external + num_loaded):
            return False
        self._leave_tiers(request, len(hits), num_loaded // self._state.block_size)
        if not request.was_started:
            request.was_started = True
            request.num_cached_tokens = min(num_hit + num_loaded, request.num_prompt_tokens)
            self._state.count_start(request)
        if request.has_help and not self._kv.grow(request, request.num_tokens, for_anybody=True):
            request.go_alone()  # a launched step may still write what is free
        row = self._chunk(plan, request, True, num_external)
        end = request.num_computed_tokens + row.num_tokens
        grown = self._kv.grow(request, request.num_tokens if takes_all(request) else end)
        assert grown, "room was checked"
        self._take_slot(plan, request)
        plan.put(request, row)
        return True

    def _start_share(self, plan: StepPlan, request: Request, admission: Admission) -> None:
        """Starts a share of another node's prompt, which has all its blocks, when what comes before has begun to
        come."""
        row = self._chunk(plan, request, is_new=True)
        if row.num_tokens:
            self._take_slot(plan, request)
            plan.put(request, row)
        else:
            admission.num_passed_by += 1

    def _may_have_slot(self, request: Request) -> bool:
        return bool(self._queues.free_slots or who_gives_way(self._queues.running, request))

    def _with_adapters(self, waiting: list[Request]) -> list[Request]:
        """The requests of `waiting` whose adapter has a slot or may have one. Behind one that has waited for a slot for
        long, no other takes one: slots that are never idle would else never be its."""
        if not self._queues.adapters.num_slots:
            return waiting
        able, is_held = [], False
        for request in waiting:
            adapter = request.prompt.adapter
            if adapter is None or (not is_held and self._queues.adapters.may_take(adapter)):
                able.append(request)
            else:
                is_held = is_held or self._state.clock.now() - request.waiting_since > ADAPTER_PATIENCE_S
        return able

    def _take_slot(self, plan: StepPlan, request: Request) -> None:
        if not self._queues.free_slots:
            self._yield(plan, who_gives_way(self._queues.running, request)[0])
        self._state.enter_batch(request)

    def _take_blocks(self, plan: StepPlan, request: Request, hits: list[int]) -> bool:
        """Preempts less important running requests for a waiting one, if they have enough blocks for it."""
        pool, yielding = self._state.pool, who_gives_way(self._queues.running, request)
        own, hits = self._kv.num_future_blocks(request, len(hits)), self._kv.needed_hits(request, hits)
        if own > pool.num_free - pool.num_unused(hits) + sum(len(other.block_ids) for other in yielding):
            return False
        for other in yielding:
            self._yield(plan, other)
            if pool.reservations.make_room(own + self._num_reserved(), self._kind_of(request), request, hits):
                return True
        return False  # they shared blocks with others

    def _num_reserved(self) -> int:
        """How many more blocks requests in the batch will need for the tokens that they have, beams for all theirs."""
        return sum(self._kv.num_future_blocks(other) for other in self._queues.running)

    def _yield(self, plan: StepPlan, victim: Request) -> None:
        victim.num_yields += 1
        self._preempt(plan, victim)

    def _kind_of(self, request: Request) -> Kind:
        """What a request asks for room as. Tickets may wait for what a granted prompt keeps at its sink, so that one
        gets their hits, too."""
        return Kind.CLAIM if self._is_granted(request) else Kind.START

    def _is_granted(self, request: Request) -> bool:
        connector = self._state.connector
        return connector is not None and request.prompt.mode == "prefill" and connector.is_granted(request)

    def _ask_connector(self, request: Request, num_computed_tokens: int) -> int | None:
        if self._state.connector is None or request.prompt.mode != "prefill":
            return 0
        num_external = self._state.connector.get_num_new_matched_tokens(request, num_computed_tokens)
        assert num_external is None or num_computed_tokens + num_external < request.num_tokens, (
            "nothing left to compute"
        )
        return num_external

    def _ask_tiers(self, plan: StepPlan, request: Request, hits: list[int], num_external: int | None) -> int | None:
        """Asks the tiers for a request, also while it waits for its connector, so that both waits overlap."""
        if num_external:
            return 0
        is_alone = not plan.rows and not self._queues.running and len(self._queues.waiting) == 1
        hashes = self._kv.reusable_hashes(request)
        is_next = num_external is not None
        is_taking_all = is_next and takes_all(request)
        num_taken = self._kv.num_blocks_for(request.num_tokens) - len(hits) if is_taking_all else 0
        return self._state.tiers.prepare(request, hashes, hits, is_alone and is_next, num_taken)

    def _leave_tiers(self, request: Request, num_hits: int, num_loaded: int) -> None:
        """Tells the tiers that a request has its blocks: those from them are there, or come with this step."""
        tiers, hashes = self._state.tiers, self._kv.reusable_hashes(request)
        if num_loaded:
            loaded = slice(num_hits, num_hits + num_loaded)
            tiers.load_with_step(request, request.block_ids[loaded], hashes[loaded])
        tiers.started(request, hashes)

    def _unlock(self) -> None:
        """Makes the least important holder of blocks start over, when holders wait for each other (one for a slot that
        another has, which waits for a block). A beam that waits for its siblings goes before all others, and even the
        last: it has computed what this step of its search needs."""
        stuck = self._preemptable()
        done = [request for request in stuck if request.candidates is not None]
        if done or len(stuck) > 1:
            self._state.preempt(max(done or stuck, key=lambda r: r.sort_key))
