"""What a node's logic needs of its scheduler, and no more: whoever explores says which request starts, whose step runs
and whose token comes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import FirstToken
from tandem.engine.scheduling.ports import KVConnectorScheduler, LowerTiers
from tandem.engine.scheduling.request import Request, RequestState, TokensEvent
from tandem.engine.scheduling.stop import max_num_tokens
from tests.worlds.setting import BLOCK, hashes_of


class Planner:
    """Stands for Scheduler and its state. Steps complete as soon as they are launched: on a device they only delay what
    follows."""

    block_size = BLOCK
    num_speculative_tokens = 0

    def __init__(self, pool: BlockPool, connector: KVConnectorScheduler | None, tiers: LowerTiers) -> None:
        self.pool, self.connector, self.tiers = pool, connector, tiers
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.state = self.kv = self.queues = self
        self._step_id = 0

    # --- for the node's logic -------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def extend_hashes(self, request: Request) -> None:
        request.block_hashes = hashes_of(request.key.request_id, request.num_tokens // BLOCK)

    def add(self, request: Request) -> None:
        self.extend_hashes(request)
        self._adopt(request)
        self.waiting.append(request)

    def add_committed(
        self, request: Request, block_ids: list[int], first_tokens: Sequence[FirstToken], num_cached_tokens: int = 0
    ) -> None:
        assert len(block_ids) == -(-request.num_prompt_tokens // BLOCK), "committed KV has a hole"
        self._adopt(request)
        request.block_ids, request.num_computed_tokens = block_ids, request.num_prompt_tokens
        request.num_passed_blocks = block_ids.count(self.pool.null_block)
        alive = [(token.sample_index, token.token_id) for token in first_tokens if not token.finished]
        if alive:
            ((sample, token),) = alive  # nobody forks here
            request.sample_indices = (sample,)
            request.output_token_ids = [token]
            self._enter(request)
        else:
            self.leave(request)

    def abort(self, key: AttemptKey, samples: Sequence[int] = ()) -> None:
        for request in [r for r in (*self.waiting, *self.running) if r.key == key]:
            if not samples or set(request.sample_indices) <= set(samples):
                self.leave(request)

    def sequence_of(self, key: AttemptKey, sample: int) -> Request | None:
        every = (*self.running, *self.waiting)
        return next((each for each in every if each.key == key and each.sample_indices == (sample,)), None)

    def flush(self) -> None:
        self.pool.flush()

    def check_integrity(self) -> None:
        for request in self.running:
            assert all(self.pool.ref_count(block_id) for block_id in request.block_ids), "it runs on freed blocks"
            needless = self.pool.window.num_passed(request.num_computed_tokens)
            assert request.num_passed_blocks <= needless, "a block that the next row reads was given back, or not sent"

    # --- for who explores -----------------------------------------------------------------------------------

    def start(self, request: Request) -> list[Any]:
        """If it may; with its first step. The connector is asked also where there is no room: that is harsher."""
        connector = self.connector if request.prompt.mode == "prefill" else None
        if connector is not None and connector.get_num_new_matched_tokens(request, 0) is None:
            return []
        known = self.pool.match_prefix(request.block_hashes[: (request.num_tokens - 1) // BLOCK])
        hits = self.pool.windows.usable(known)
        num_new = -(-request.num_tokens // BLOCK) - len(hits)
        kind = Kind.CLAIM if connector is not None and connector.is_granted(request) else Kind.START
        if not self.pool.reservations.make_room(self.pool.cost(num_new), kind, request, hits):
            return []
        if self.tiers.prepare(request, request.block_hashes, hits, runs_alone=not self.running) is None:
            return []
        self.pool.touch(hits)
        new = self.pool.allocate(num_new)
        assert new is not None
        self.tiers.started(request, request.block_hashes)
        request.block_ids = [*hits, *new]
        self._enter(request)
        if connector is None:
            request.num_computed_tokens = len(hits) * BLOCK
            return []
        connector.update_state_after_alloc(request, request.block_ids, 0)
        return self.launch(request)

    def launch(self, request: Request) -> list[Any]:
        """A step of a prompt: its first block, or all the rest of it. Its jobs for the transfer thread."""
        self._step_id += 1
        begin, end = request.num_computed_tokens, request.num_prompt_tokens
        row = SimpleNamespace(slot=request.slot, start=begin, num_tokens=(end if begin else min(BLOCK, end)) - begin)
        assert self.connector is not None
        meta = self.connector.build_connector_meta(SimpleNamespace(step_id=self._step_id, rows=(row,)))  # type: ignore[arg-type]
        self.pool.step_launched(self._step_id)
        self.pool.step_completed(self._step_id)
        request.num_computed_tokens += row.num_tokens
        return [*meta.whole, *meta.pushes] if meta is not None else []

    def finish(self, request: Request, all_finished: bool) -> None:
        """The first token of a prompt that is handed over has come."""
        request.first_tokens = [FirstToken(0, 1, all_finished)]
        self.leave(request)

    def decode(self, request: Request) -> None:
        """A step of a sequence, from whose tokens, all of them, the next one comes."""
        missing = -(-request.num_tokens // BLOCK) - len(request.block_ids)
        new = self.pool.allocate(max(0, missing))
        assert new is not None, "a setting's pools have room for all sequences"
        self._slide(request)
        request.block_ids = [*request.block_ids, *new]
        written = request.block_ids[request.num_computed_tokens // BLOCK :]
        is_read = any(self.pool.ref_count(block_id) > 1 for block_id in written)
        assert not is_read, "a block is written while somebody reads it"
        seen = request.block_ids[self.pool.window.num_passed(request.num_computed_tokens) :]
        assert all(map(self.pool.windows.is_whole, seen)), "a row reads window blocks which it has not"
        request.num_computed_tokens = request.num_tokens
        request.num_in_flight = 1

    def land(self, request: Request) -> list[TokensEvent]:
        """That token, which is the number of those before it, so that nobody can mistake it; of each sample."""
        request.num_in_flight = 0
        token = request.prompt.num_prior_output_tokens + len(request.output_token_ids)
        is_last = request.num_tokens + 1 >= request.max_num_tokens
        events = []
        for each in self._fork(request):
            each.output_token_ids = [*each.output_token_ids, token]
            events.append(TokensEvent(each, each.sample_indices[0], token, (token,), "length" if is_last else None))
            if is_last:
                self.leave(each)
        return events

    def preempt(self, request: Request) -> None:
        """And takes it up again at once: there is room."""
        self._free(request)
        request.num_preemptions += 1
        request.num_computed_tokens, request.num_passed_blocks, request.block_ids = 0, 0, []

    def leave(self, request: Request) -> None:
        for line in (self.waiting, self.running):
            if request in line:
                line.remove(request)
        request.state, request.slot = RequestState.FINISHED, -1
        connector = self.connector if request.prompt.mode == "prefill" else None
        if connector is None or not connector.request_finished(request, request.block_ids):
            self._free(request)
        request.block_ids = []
        self.tiers.ended(request)

    # --- inside ---------------------------------------------------------------------------------------------

    def _slide(self, request: Request) -> None:
        """Gives back what the next row does not read, as KVAllocator.slide does."""
        first = request.num_passed_blocks
        num_passed = 0 if request.keeps_blocks else self.pool.window.num_passed(request.num_computed_tokens)
        if num_passed > first and self.pool.windows.num_each:
            self.pool.windows.pass_by(request.block_ids[first:num_passed], None)
            request.num_passed_blocks = num_passed
        elif num_passed > first:
            passed = request.block_ids[first:num_passed]
            request.block_ids = [*self.pool.passed(num_passed), *request.block_ids[num_passed:]]
            self.pool.free([*[self.pool.null_block] * first, *passed], None)
            request.num_passed_blocks = num_passed

    def _free(self, request: Request) -> None:
        self.pool.free(request.block_ids, None, request.num_passed_blocks if self.pool.windows.num_each else 0)

    def _adopt(self, request: Request) -> None:
        request.max_num_tokens = max_num_tokens(request, 1 << 20)

    def _enter(self, request: Request) -> None:
        if request in self.waiting:
            self.waiting.remove(request)
        taken = {each.slot for each in self.running}
        request.state, request.slot = RequestState.RUNNING, min(set(range(len(taken) + 1)) - taken)
        self.running.append(request)

    def _fork(self, request: Request) -> list[Request]:
        """A sequence for each sample, once the prompt is computed. The first one keeps the prompt's blocks; the others
        compute it again: a sequence's blocks are its own here."""
        first, *others = request.sample_indices
        request.sample_indices = (first,)
        forks = [Request(request.prompt, (sample,), list(request.block_hashes)) for sample in others]
        for fork in forks:
            self._adopt(fork)
            self._enter(fork)
        return [request, *forks]
