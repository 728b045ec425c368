"""The scheduler's books: queues, slots, blocks of each request, and how requests enter, fork, lose blocks and leave.

Invariants: a RUNNING request has a slot; a request has blocks only while RUNNING, or WAITING with committed KV; every
block reference of a request is in its `block_ids`, and the source of each pending copy has one reference of its own.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import SchedulerOptions
from tandem.engine.hashing import BlockHasher
from tandem.engine.interfaces import KVConnectorScheduler
from tandem.engine.request import EngineEvent, FailedEvent, Request, RequestState
from tandem.engine.step import BlockCopy

Key = tuple[str, int]


def queue_order(request: Request) -> tuple[int, int, int]:
    """Who goes first: lower priority number, then earlier arrival, then lower sample."""
    return request.priority, request.arrival, request.sample_indices[0]


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A fork's tail: copied at the start of the next step, before anything can overwrite the source."""

    child: Request
    copy: BlockCopy


class SchedulerState:
    """See module docstring. `block_size` and lengths in tokens."""

    def __init__(
        self,
        options: SchedulerOptions,
        pool: BlockPool,
        *,
        block_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        root_for_salt: Callable[[bytes], bytes],
        hash_block_size: int = 0,
        limits_prompt_work: bool = False,
        connector: KVConnectorScheduler | None = None,
    ) -> None:
        self.options = options
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.limits_prompt_work = limits_prompt_work
        self.connector = connector
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self._hasher = BlockHasher(block_size, hash_block_size or block_size, root_for_salt)
        self._requests: dict[Key, list[Request]] = {}
        self._free_slots = list(range(options.max_num_seqs - 1, -1, -1))
        self._pending_copies: list[PendingCopy] = []
        self._events: list[EngineEvent] = []
        self._next_step = 0

    # --- entering -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request whose KV is to be computed here."""
        if self.blocks_for(request.num_tokens + 1) > self.pool.num_blocks:
            needed = self.blocks_for(request.num_tokens + 1)
            text = f"the prompt needs {needed} KV blocks and the pool has {self.pool.num_blocks}"
            self._events.append(FailedEvent(request, "too_large_for_pool", text, False))
            return
        self._extend_hashes(request)
        self._requests.setdefault(request.key, []).append(request)
        self._enqueue(request)

    def add_committed(
        self, request: Request, block_ids: list[int], first_tokens: Sequence[tuple[int, int, bool]]
    ) -> None:
        """Take over a prompt whose KV is complete in `block_ids` (one reference each passes to the scheduler).

        `first_tokens`: (sample_index, token_id, finished); the client has these tokens. Unfinished samples go on.
        """
        alive = [(sample, token) for sample, token, finished in first_tokens if not finished]
        request.block_ids = list(block_ids)
        request.num_computed_tokens = request.num_prompt_tokens
        self._extend_hashes(request)
        self._register_blocks(request, None)
        if not alive:
            self._release_blocks(request)
            return
        request.sample_indices = tuple(sample for sample, _ in alive)
        self._requests.setdefault(request.key, []).append(request)
        self._enqueue(request)
        for sample, token in alive[1:]:
            child = self._make_child(request, sample)
            child.output_token_ids.append(token)
            if self._share_blocks(request, child, request.num_prompt_tokens):
                child.num_computed_tokens = request.num_prompt_tokens
            self._enqueue(child)
        request.sample_indices = (alive[0][0],)
        request.output_token_ids.append(alive[0][1])

    # --- leaving --------------------------------------------------------------------------------------------

    def abort(self, request_id: str, attempt: int, sample_indices: tuple[int, ...] = ()) -> None:
        """Ends these samples (all when empty) in whatever state they are. Idempotent; makes no event."""
        for request in list(self._requests.get((request_id, attempt), ())):
            kept = tuple(s for s in request.sample_indices if sample_indices and s not in sample_indices)
            if kept:
                request.sample_indices = kept
            else:
                self._finish(request)

    def _finish(self, request: Request) -> None:
        """The request leaves for good; tokens still in flight will be dropped."""
        siblings = self._requests[request.key]
        siblings.remove(request)
        if not siblings:
            del self._requests[request.key]
        self._leave_queues(request)
        request.state = RequestState.FINISHED
        handed_over = (
            request.mode == "prefill"
            and self.connector is not None
            and self.connector.request_finished(request, request.block_ids)
        )
        if handed_over:
            request.block_ids = []
        else:
            self._release_blocks(request)

    def _fail(self, request: Request, code: str, text: str, retryable: bool) -> None:
        self._events.append(FailedEvent(request, code, text, retryable))
        for sibling in list(self._requests.get(request.key, ())):
            self._finish(sibling)

    def _preempt(self, request: Request) -> None:
        """Blocks go at once, tokens in flight still land; it starts over from what is cached then."""
        self._leave_queues(request)
        self._release_blocks(request)
        request.num_computed_tokens = 0
        request.num_registered_blocks = 0
        request.state = RequestState.PREEMPTED
        request.prompt_logprobs.clear()
        request.num_preemptions += 1
        self.num_preemptions += 1
        bisect.insort(self.waiting, request, key=queue_order)

    def _leave_queues(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            request.slot = -1
        elif request in self.waiting:
            self.waiting.remove(request)

    def _release_blocks(self, request: Request) -> None:
        self.pool.free(request.block_ids, request.last_step if request.last_step >= 0 else None)
        request.block_ids = []

    def _enqueue(self, request: Request) -> None:
        request.state = RequestState.WAITING
        bisect.insort(self.waiting, request, key=queue_order)

    # --- forks ----------------------------------------------------------------------------------------------

    def _make_child(self, parent: Request, sample_index: int) -> Request:
        child = Request(
            request_id=parent.request_id,
            attempt=parent.attempt,
            prompt_token_ids=parent.prompt_token_ids,
            sampling=parent.sampling,
            sample_indices=(sample_index,),
            num_prior_output_tokens=parent.num_prior_output_tokens,
            priority=parent.priority,
            arrival=parent.arrival,
            mode=parent.mode,
            use_prefix_cache=parent.use_prefix_cache,
            salt=parent.salt,
            owner=parent.owner,
            block_hashes=list(parent.block_hashes),
        )
        child.num_cached_tokens = parent.num_cached_tokens
        child.prompt_logprobs_sent = True
        self._requests[parent.key].append(child)
        return child

    def _share_blocks(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """Gives `child` the KV of the parent's first `num_tokens` tokens: full blocks shared, the tail copied by the
        next step. False (and nothing changed) when no block is free for the tail."""
        num_full, num_tail = divmod(num_tokens, self.block_size)
        tail: list[int] = []
        if num_tail:
            allocated = self.pool.allocate(1)
            if allocated is None:
                return False
            tail = allocated
            source = parent.block_ids[num_full]
            self.pool.touch([source])  # the source must keep its content until the copy is launched
            self._pending_copies.append(PendingCopy(child, BlockCopy(source, tail[0], num_tail)))
        shared = parent.block_ids[:num_full]
        self.pool.touch(shared)
        child.block_ids = shared + tail
        child.last_step = parent.last_step
        return True

    def _take_copies(self, step_id: int) -> tuple[BlockCopy, ...]:
        """Copies of children that still hold their tail; the sources are let go of after this step."""
        copies = []
        for pending in self._pending_copies:
            if pending.copy.destination in pending.child.block_ids:
                copies.append(pending.copy)
                pending.child.last_step = max(pending.child.last_step, step_id)
            self.pool.free([pending.copy.source], step_id)
        self._pending_copies.clear()
        return tuple(copies)

    # --- blocks and hashes ----------------------------------------------------------------------------------

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """New blocks so that `request` can hold `num_tokens` tokens; None when the pool has too few."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        return self.pool.allocate(missing)

    def _extend_hashes(self, request: Request) -> None:
        if self.pool.enable_caching:
            num_hashed = len(request.block_hashes) * self.block_size
            self._hasher.extend(request.block_hashes, known_tokens(request)[num_hashed:], request.salt)

    def _register_blocks(self, request: Request, step: int | None) -> None:
        """Makes every block findable whose tokens are known and whose KV is computed (by launched steps)."""
        if not self.pool.enable_caching:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if len(request.block_hashes) < num_full:
            self._extend_hashes(request)
        for index in range(request.num_registered_blocks, num_full):
            parent = request.block_hashes[index - 1] if index else None
            self.pool.register(request.block_ids[index], request.block_hashes[index], parent, step)
        request.num_registered_blocks = max(request.num_registered_blocks, num_full)

    # --- counts and checks ----------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens accepted and not yet computed."""
        return sum(max(0, r.num_tokens - r.num_computed_tokens) for r in (*self.waiting, *self.running))

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._pending_copies or self._events)

    def check_integrity(self) -> None:
        self.pool.check_integrity()
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.options.max_num_seqs)), "a slot is lost or shared"
        known = [request for siblings in self._requests.values() for request in siblings]
        assert {id(r) for r in known} == {id(r) for r in (*self.running, *self.waiting)}, "a request is in no queue"
        references: dict[int, int] = {}
        for request in known:
            assert request.num_in_flight >= 0
            for block_id in request.block_ids:
                references[block_id] = references.get(block_id, 0) + 1
        for pending in self._pending_copies:
            references[pending.copy.source] = references.get(pending.copy.source, 0) + 1
        for block_id, count in references.items():
            assert self.pool.ref_count(block_id) >= count, f"block {block_id} is used by {count} requests"

    def assert_empty(self) -> None:
        """For tests: every request has left and nothing of it is held."""
        self.check_integrity()
        assert not self._requests
        assert not self.has_work()
        assert self.pool.num_free == self.pool.num_blocks, "a block leaked"


def known_tokens(request: Request) -> np.ndarray:
    """int32 [num_tokens]: prompt, then output."""
    if not request.output_token_ids:
        return request.prompt_token_ids
    return np.concatenate((request.prompt_token_ids, np.asarray(request.output_token_ids, np.int32)))
