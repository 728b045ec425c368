"""The scheduler's books: queues, slots, and how requests enter, fork, lose their blocks and leave.

Invariants: a RUNNING request has a slot; a request has blocks only while RUNNING, or WAITING with committed KV; every
block reference of a request is in its `block_ids`, and the source of each pending copy has one reference of its own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from tandem.engine.blocks.adapter_slots import AdapterSlots
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.hashing import BlockHasher
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.durations import note_duration
from tandem.engine.contracts.wire.parts import KV_OVERFLOW, FirstToken, Targets
from tandem.engine.scheduling import stop
from tandem.engine.scheduling.allocator import KVAllocator
from tandem.engine.scheduling.beams.search import BeamSearch
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.ports import KVConnectorScheduler, LowerTiers, NoShares, NoTiers, PromptShares
from tandem.engine.scheduling.prompt_order import ArrivalOrder, PromptOrder
from tandem.engine.scheduling.request import EngineEvent, FailedEvent, Request, RequestState
from tandem.engine.scheduling.times.step_sizes import StepSizes
from tandem.engine.scheduling.times.step_times import StepTimes


def _sort_key(request: Request) -> tuple[int, int, int]:
    return request.sort_key


class Queues:
    """Who waits and who runs, each in the order of `Request.sort_key`, and the slots of those who run."""

    def __init__(self, num_slots: int, num_adapter_slots: int) -> None:
        self.num_slots = num_slots
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free_slots = list(range(num_slots - 1, -1, -1))
        self.adapters = AdapterSlots(num_adapter_slots)

    def wait(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=_sort_key)

    def put_first(self, request: Request) -> None:
        """Moves a request that has waited long enough before all others that wait."""
        self.waiting.remove(request)
        request.is_aged = True
        self.wait(request)

    def run(self, request: Request) -> None:
        """Gives a request that is in no queue a slot. The caller knows that there is one, for its adapter too."""
        request.state = RequestState.RUNNING
        request.slot = self.free_slots.pop()
        request.adapter_slot = self.adapters.take(request.prompt.adapter)
        bisect.insort(self.running, request, key=_sort_key)

    def leave(self, request: Request) -> None:
        if request.state is RequestState.RUNNING:
            self.running.remove(request)
            self.free_slots.append(request.slot)
            request.slot = -1
            self.adapters.release(request.prompt.adapter)
            request.adapter_slot = 0
        else:
            self.waiting.remove(request)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens accepted whose KV is not computed by any launched step."""
        return sum(max(0, r.num_tokens - r.num_computed_tokens) for r in (*self.waiting, *self.running))

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raises AssertionError unless just `requests` are in the queues, in order, and each slot is one's or free."""
        slots = [request.slot for request in self.running]
        assert sorted(slots + self.free_slots) == list(range(self.num_slots)), "a slot is lost or shared"
        self.adapters.check_integrity([request.prompt.adapter for request in self.running])
        queued = [*self.running, *self.waiting]
        assert len(requests) == len(queued), "a request is in no queue, or in two"
        assert {id(request) for request in requests} == {id(request) for request in queued}
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=_sort_key), "a queue is out of order"


class SchedulerState:
    """The books themselves. Lengths are in tokens."""

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
        prompt_order: PromptOrder | None = None,
        tiers: LowerTiers | None = None,
        clock: StepClock | None = None,
        num_adapter_slots: int = 0,
        shares: PromptShares | None = None,
    ) -> None:
        """`root_for_salt`: where the chain of block hashes starts. `hash_block_size` 0: the block size.
        `limits_prompt_work`: heed `decode_prompt_budget` (decode nodes). `connector` sees mode "prefill" only.
        `clock`: told of every step; None: nothing is measured. ValueError: `block_size` is no multiple of
        `hash_block_size`."""
        self.options = options
        self.targets = Targets(options.ttft_target_ms / 1e3, options.tpot_target_ms / 1e3, options.itl_max_ms / 1e3)
        self.pool = pool
        self.clock = clock or StepClock(lambda: 0.0)
        hasher = BlockHasher(block_size, hash_block_size or block_size, root_for_salt)
        most_row_tokens = min(options.max_num_batched_tokens, options.max_prefill_chunk or math.inf)
        self.kv = KVAllocator(pool, hasher, int(most_row_tokens), self.clock.now)
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.limits_prompt_work = limits_prompt_work
        self.connector = connector
        self.prompt_order = prompt_order or ArrivalOrder()
        self.tiers: LowerTiers = NoTiers() if tiers is None else tiers
        self.shares: PromptShares = NoShares() if shares is None else shares
        self.queues = Queues(options.max_num_seqs, num_adapter_slots)
        self.step_times, self.step_sizes = StepTimes(), StepSizes()  # measured when the device is warm
        self.num_preemptions = 0
        self.num_faults = 0  # requests that were given up
        self.num_overflowed = 0  # requests whose KV this pool's dtype could not hold
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of prompts that started here; found in any cache
        self.waits = {"queue_s": 0.0}  # from a prompt's coming to its first start
        self.events: list[EngineEvent] = []
        self._requests: dict[AttemptKey, list[Request]] = {}
        self._num_adopted = 0

    # --- entering -------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues a request whose KV is to be computed here. What can never run here fails with the next events."""
        self._adopt(request)
        self._admit_or_fail([request])

    def add_committed(
        self,
        request: Request,
        block_ids: Sequence[int],
        first_tokens: Sequence[FirstToken],
        num_cached_tokens: int = 0,
    ) -> None:
        """Takes over a prompt whose KV is complete in `block_ids`, one reference to each included.

        The client has `first_tokens`. Unfinished samples go on:
        their full blocks are shared, the last partial one is copied. A sample for which there is no block or, until
        then, no slot left waits; if its blocks are needed by others it computes its prompt again.
        """
        self._take_over(request, block_ids, num_cached_tokens)
        alive = [(token.sample_index, token.token_id) for token in first_tokens if not token.finished]
        if not alive:
            self.kv.release(request)
            request.state = RequestState.FINISHED
            return
        sequences = [request] + [self.make_child(request, (sample,)) for sample, _ in alive[1:]]
        for child in sequences[1:]:
            if self.kv.fork(request, child, request.num_prompt_tokens):
                child.num_computed_tokens = request.num_prompt_tokens
        for sequence, (sample, token) in zip(sequences, alive, strict=True):
            sequence.sample_indices = (sample,)
            sequence.output_token_ids.append(token)
            sequence.first_token_at = self.clock.now()
        self._admit_or_fail(sequences)

    def add_computed(self, request: Request, block_ids: Sequence[int], num_cached_tokens: int) -> bool:
        """Takes over a prompt as `add_committed` does, but one behind which nothing has been drawn yet. Returns False
        if it can't run here, and so has failed."""
        self._take_over(request, block_ids, num_cached_tokens)
        return self._admit_or_fail([request])

    def add_share(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Takes in a share of a prompt that other nodes compute, too, with all its blocks, one reference to each
        included. False: it can't run here, and has failed."""
        self._adopt(request)
        request.block_ids = list(block_ids)
        return self._admit_or_fail([request])

    def _take_over(self, request: Request, block_ids: Sequence[int], num_cached_tokens: int) -> None:
        assert len(block_ids) == self.kv.num_blocks_for(request.num_prompt_tokens), "committed KV has a hole"
        self._adopt(request)
        request.num_cached_tokens = num_cached_tokens
        request.was_started = request.prompt_logprobs_sent = True
        self.kv.take_over(request, block_ids)

    def count_start(self, request: Request) -> None:
        """Counts the prompt of `request`, how long it waited, and what is cached of it, at its first start."""
        note_duration(self.waits, "queue_s", self.clock.now() - request.waiting_since)
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens

    def make_child(self, parent: Request, sample_indices: tuple[int, ...]) -> Request:
        """A request for some of the parent's samples; it has no blocks and is in no queue yet."""
        child = Request(parent.prompt, sample_indices, list(parent.block_hashes), beams=parent.beams)
        child.num_cached_tokens = parent.num_cached_tokens
        child.was_started = child.prompt_logprobs_sent = True  # the parent sends them, once
        self._adopt(child)
        return child

    def _adopt(self, request: Request) -> None:
        self._num_adopted += 1
        request.order = self._num_adopted
        request.targets = request.prompt.targets.or_else(self.targets)
        request.max_num_tokens = stop.max_num_tokens(request, self.max_model_len)
        sampling = request.prompt.sampling
        if sampling.beam_width and request.prompt.mode != "prefill" and request.beams is None:
            most = request.max_num_tokens - request.num_prompt_tokens
            request.beams = BeamSearch(sampling, stop.end_ids(sampling, self.eos_token_ids), most)
        del request.block_hashes[request.num_tokens // self.block_size :]

    def _admit_or_fail(self, sequences: Sequence[Request]) -> bool:
        """Queues all sequences of one request. They are equally long, so all can run here or none, with one event."""
        request = sequences[0]
        if text := self.kv.why_too_large(request):
            self._refuse(sequences, "too_large_for_pool", text)
        elif request.prompt.sampling.beam_width > self.options.max_num_seqs:
            text = f"a node here runs {self.options.max_num_seqs} sequences: lower beam_width"
            self._refuse(sequences, "invalid_request", text)
        elif not request.can_advance:
            text = f"{request.num_tokens} tokens are known and {request.max_num_tokens} are all that it may have"
            self._refuse(sequences, "too_long", text)
        else:
            for sequence in sequences:
                self.enqueue(sequence)
            return True
        return False

    def _refuse(self, sequences: Sequence[Request], code: str, text: str) -> None:
        self.events.append(FailedEvent(sequences[0], code, text, retryable=False))
        for sequence in sequences:
            self._end(sequence)

    def enqueue(self, request: Request) -> None:
        self._requests.setdefault(request.key, []).append(request)
        self.prompt_order.arrived(request)
        request.waiting_since = self.clock.now()
        request.state = RequestState.WAITING
        self.queues.wait(request)

    # --- moving ---------------------------------------------------------------------------------------------

    def enter_batch(self, request: Request) -> None:
        """Moves a request from the waiting queue into a slot."""
        self.queues.leave(request)
        self.queues.run(request)

    def fork_into_batch(self, child: Request) -> None:
        """Puts a new child into a slot beside its parent's."""
        self._requests[child.key].append(child)
        self.queues.run(child)

    def preempt(self, request: Request) -> None:
        """Takes its blocks from a request; its tokens in flight still land, then it starts over from what is cached."""
        self.queues.leave(request)
        self.kv.release(request)
        request.state = RequestState.PREEMPTED
        request.num_preemptions += 1
        self.num_preemptions += 1
        request.waiting_since = self.clock.now()
        self.queues.wait(request)

    # --- leaving --------------------------------------------------------------------------------------------

    def abort(self, key: AttemptKey, sample_indices: Sequence[int] = ()) -> None:
        """Ends these samples (all when empty) in whatever state they are. Idempotent; makes no event."""
        for request in list(self._requests.get(key, ())):
            kept = tuple(s for s in request.sample_indices if sample_indices and s not in sample_indices)
            if kept:
                request.sample_indices = kept
            else:
                self.finish(request)

    def sequence_of(self, key: AttemptKey, sample_index: int) -> Request | None:
        """The sequence that makes this sample alone; None while it has not forked, when it has ended, and where beams
        are searched: no beam is a sample."""
        own = [each for each in self.sequences(key) if each.beams is None and each.sample_indices == (sample_index,)]
        return own[0] if own else None

    def sequences(self, key: AttemptKey) -> list[Request]:
        """All sequences of a request that have not ended."""
        return list(self._requests.get(key, ()))

    def finish(self, request: Request) -> None:
        """The request leaves for good; tokens still in flight will be dropped."""
        siblings = self._requests[request.key]
        siblings.remove(request)
        if not siblings:
            del self._requests[request.key]
        self.queues.leave(request)
        self._end(request)

    def fail(self, request: Request, code: str, text: str, retryable: bool = False) -> list[Request]:
        """Gives up the whole request with one FailedEvent; returns all of its sequences."""
        self.events.append(FailedEvent(request, code, text, retryable))
        sequences = list(self._requests[request.key])
        for sequence in sequences:
            self.finish(sequence)
        return sequences

    def fail_holders(self, code: str, text: str) -> None:
        """Fails each request of which any sequence has blocks."""
        for sequences in [each for each in self._requests.values() if any(s.block_ids for s in each)]:
            self.fail(sequences[0], code, text, retryable=True)

    def fail_overflowed(self, requests: Iterable[Request], saturated: frozenset[int]) -> None:
        """Fails `requests`, and whoever else holds one of the `saturated` blocks: their KV would need more range than
        this pool's dtype has. Another attempt is served with KV of 16 bits."""
        self.pool.spoil(saturated)
        holders = [r for each in self._requests.values() for r in each if not saturated.isdisjoint(r.block_ids)]
        text = "its keys or values are too large for KV in fp8: it needs KV of 16 bits (--precise-kv-tokens)"
        for request in (*requests, *holders):
            if request.state is not RequestState.FINISHED:
                self.num_overflowed += 1
                self.fail(request, KV_OVERFLOW, text, retryable=True)

    def give_up(self, request: Request, text: str) -> list[Request]:
        """Fails a request for an exception that nobody expected, of work that was for it alone. AssertionError when the
        books don't hold without it: then the exception was about more, and the process must end."""
        self.num_faults += 1
        sequences = self.fail(request, "internal_error", text, retryable=True)
        self.check_integrity()
        return sequences

    def _end(self, request: Request) -> None:
        request.state = RequestState.FINISHED
        self.prompt_order.ended(request)
        self.tiers.ended(request)
        self.shares.ended(request)
        if request.prompt.mode != "prefill" or self.connector is None:
            self.kv.release(request)
        elif not self.connector.request_finished(request, block_ids := self.kv.detach(request)):
            self.pool.free(block_ids, request.last_step)

    def take_events(self) -> list[EngineEvent]:
        """Events since the last call, those of planning and entering included."""
        events, self.events = self.events, []
        return events

    # --- counts and checks ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Drops every cached block that nobody uses, on the device and below."""
        self.pool.flush()
        self.tiers.flush()

    def has_work(self) -> bool:
        return bool(self.queues.waiting or self.queues.running or self.events)

    def check_integrity(self, external_references: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError when an invariant does not hold. With `external_references` (block_id -> references
        held by others) every reference must be accounted for; {} means that only requests hold blocks."""
        self.pool.check_integrity()
        self.tiers.check_integrity()
        requests = [request for siblings in self._requests.values() for request in siblings]
        self.queues.check_integrity(requests)
        for request in requests:
            assert (request in self.queues.running) == (request.state is RequestState.RUNNING)
            request.check_integrity(self.kv.num_blocks_for(request.num_computed_tokens))
        references = self.kv.references(requests)
        for block_id in range(self.pool.num_blocks):
            if self.pool.windows.owner(block_id) is not None:
                continue  # whoever holds the block that it belongs to holds it
            held = references[block_id] + (external_references or {}).get(block_id, 0)
            count = self.pool.ref_count(block_id)
            assert count >= held, f"block {block_id} has {count} references, requests hold {held}"
            assert count == held or external_references is None, f"block {block_id}: nobody holds one of {count}"
        num_nulls = self.pool.ref_count(self.pool.null_block) - 2
        assert num_nulls >= references[self.pool.null_block], "a place of the null block was freed twice"

    def assert_empty(self) -> None:
        """Asserts, for tests, that every request has left and nothing of it is held."""
        self.check_integrity({})
        assert not self._requests, "a request is left"
        assert not self.has_work(), "an event was not taken"
        assert self.pool.num_free == self.pool.num_blocks, "a block leaked"
        assert self.pool.reservations.is_empty, "somebody who is over could be asked for blocks"
        assert len(self.queues.free_slots) == self.options.max_num_seqs, "a slot leaked"
