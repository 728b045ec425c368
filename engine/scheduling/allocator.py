"""The blocks of requests: growth, prefix hits, hashes of full blocks, copies of forked tail blocks, release."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.blocks.window import NO_WINDOW
from tandem.engine.contracts.hashing import BlockHasher
from tandem.engine.contracts.tenants import tenant_of_block
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import BlockCopy


@dataclass(frozen=True, slots=True)
class PendingCopy:
    """A block copy for a fork, not yet part of a step. `destination` belongs to the forked request; a reference of the
    copy's own keeps `source` until the copy's step is built."""

    source: int
    destination: int
    num_tokens: int


class KVAllocator:
    """Moves blocks between `pool` and requests. The only code that changes a request's block list. `seconds`: what
    finding blocks took in all, by the clock `now`."""

    def __init__(
        self, pool: BlockPool, hasher: BlockHasher, most_row_tokens: int, now: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`most_row_tokens`: how many tokens of a request a step computes at most."""
        self.pool = pool
        self._most_held = pool.window.most_held(most_row_tokens)
        self.most_blocks = pool.windows.most(pool.num_blocks)  # of a sequence, so that it fits with all window blocks
        self.seconds, self._now = 0.0, now
        self.block_size = hasher.block_size
        self._hasher = hasher
        self._copies: dict[Request, PendingCopy] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # --- prefix cache ---------------------------------------------------------------------------------------

    def extend_hashes(self, request: Request) -> None:
        if self.pool.enable_caching:
            self._hasher.extend(
                request.block_hashes, request.known_token_ids, request.prompt.secrecy, request.num_tokens
            )

    def cached_prefix(self, request: Request) -> list[int]:
        """Cached blocks that `request` may start from: they end below its last token. No side effect on blocks."""
        return self.pool.windows.usable(self.pool.match_prefix(self.reusable_hashes(request)))

    def num_cached_tokens(self, request: Request) -> int:
        """The number of tokens that `cached_prefix` holds. A few look-ups suffice, since the pool never holds a block
        without those before it."""
        hashes, find = self.reusable_hashes(request), self.pool.find
        num_found = bisect.bisect_left(hashes, True, key=lambda each: find(each) is None)
        return self.block_size * self.pool.windows.num_usable(num_found, lambda index: find(hashes[index]))

    def num_left(self, request: Request) -> int:
        """How many of its tokens are to be computed, as far as is known."""
        return request.num_uncomputed_tokens - (0 if request.block_ids else self.num_cached_tokens(request))

    def reusable_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that `request` may take from a cache, wherever that is."""
        if not self.pool.enable_caching or not request.prompt.use_prefix_cache or request.needs_prompt_logprobs:
            return []
        self.extend_hashes(request)
        return request.block_hashes[: (request.num_tokens - 1) // self.block_size]

    def register_full_blocks(self, request: Request, step: int | None) -> None:
        """Makes every block findable whose tokens are known and whose KV is there once `step` has run (None: now)."""
        if not request.is_doubtful:
            self._register(request, min(request.num_computed_tokens, request.num_tokens), step)

    def _register(self, request: Request, num_tokens: int, step: int | None) -> None:
        num_full = num_tokens // self.block_size
        if not self.pool.enable_caching or request.leaves_nothing or num_full <= request.num_registered_blocks:
            return
        self.extend_hashes(request)
        num_public = self._hasher.num_public_blocks(request.prompt.secrecy)
        for index in range(request.num_registered_blocks, num_full):
            parent = request.block_hashes[index - 1] if index else None
            tenant = tenant_of_block(index, num_public, request.prompt.secrecy.salt)
            if request.block_ids[index] != self.pool.null_block:
                self.pool.register(request.block_ids[index], request.block_hashes[index], parent, step, tenant)
        request.num_registered_blocks = num_full

    # --- growth and release ---------------------------------------------------------------------------------

    def num_missing_blocks(self, request: Request, num_hits: int = 0) -> int:
        """How many blocks the launched tokens of `request` need beyond those it has, or will start from: of a sequence
        that gives blocks back, how many more it will have at once."""
        missing = self.num_blocks_for(request.num_launched_tokens) - len(request.block_ids) - num_hits
        if missing <= 0:
            return 0
        if not self._gives_back(request):
            return self.pool.cost(missing)
        num_passed = request.num_passed_blocks or self._num_passed(request, num_hits, num_hits * self.block_size)
        in_window = min(missing, max(0, self._most_held - len(request.block_ids) - num_hits + num_passed))
        return self.pool.cost(missing, missing - in_window) if self.pool.windows.num_each else in_window

    def num_blocks_for_beams(self, request: Request) -> int:
        """How many blocks all beams of `request` may need at their longest, when they share its prompt's full blocks
        alone; 0: it has none."""
        num_shared = request.num_prompt_tokens // self.block_size
        width = request.prompt.sampling.beam_width if request.beams is not None else 0
        own = width * (self.num_blocks_for(request.max_num_tokens) - num_shared)
        return width and self.pool.cost(num_shared + own)

    def why_too_large(self, request: Request) -> str:
        """Why `request` can't ever run in this pool, for people; "" when it can."""
        num_blocks = self.pool.cost(self.num_blocks_for(request.num_tokens))
        num_for_beams = self.num_blocks_for_beams(request)
        if num_blocks > self.pool.num_blocks:
            return f"the prompt needs {num_blocks} KV blocks and the pool has {self.pool.num_blocks}"
        if num_for_beams > self.pool.num_blocks:
            return (
                f"{request.prompt.sampling.beam_width} beams of {request.max_num_tokens} tokens need {num_for_beams} "
                f"KV blocks and the pool has {self.pool.num_blocks}: lower beam_width or max_tokens"
            )
        return ""

    def num_future_blocks(self, request: Request, num_hits: int = 0) -> int:
        """`num_missing_blocks`; of a sequence that carries a beam those of all tokens that it may have: when it lacks
        one, its siblings wait as well. Before the first step it is all beams'."""
        if request.beams is None:
            return self.num_missing_blocks(request, num_hits)
        if request.beams.num_tokens:
            return self.pool.cost(self.num_blocks_for(request.max_num_tokens) - len(request.block_ids) - num_hits)
        return self.num_blocks_for_beams(request) - self.pool.cost(len(request.block_ids) + num_hits)

    def start(self, request: Request, hits: list[int], num_external_tokens: int) -> bool:
        """Gives a request without blocks its cached prefix and, for tokens to be loaded, blocks that may be written
        from outside. False and no change when there are too few."""
        assert not request.block_ids
        began = self._now()
        num_computed_tokens = len(hits) * self.block_size + num_external_tokens
        num_loaded = self.num_blocks_for(num_computed_tokens) - len(hits)
        num_bare = max(0, min(self.pool.window.num_passed(num_computed_tokens) - len(hits), num_loaded))
        self.pool.touch(hits)
        request.block_ids, request.newest_row_start = list(hits), num_computed_tokens
        self._slide(request, None)  # used just now, so that others are reused before
        loaded = self.pool.allocate_grantable(num_loaded, num_bare)  # nobody may have brought more of the first ones
        self.seconds += self._now() - began
        if loaded is None:
            self._free(request, None)
            return False
        request.block_ids += loaded
        request.num_computed_tokens, request.num_registered_blocks = num_computed_tokens, len(hits)
        return True

    def needed_hits(self, request: Request, hits: list[int]) -> list[int]:
        """The `hits` that `request` would keep if it started from all of them."""
        if self.pool.windows.num_each:
            return hits
        return hits[self._num_passed(request, len(hits), len(hits) * self.block_size) :]

    def take_over(self, request: Request, block_ids: Sequence[int]) -> None:
        """Gives a request blocks with the KV of its whole prompt, one reference to each included; the first of them may
        be the null block."""
        request.block_ids = list(block_ids)
        request.num_passed_blocks = request.block_ids.count(self.pool.null_block)
        request.num_computed_tokens = request.newest_row_start = request.num_prompt_tokens
        self.register_full_blocks(request, None)
        self.slide([request])

    def slide(self, requests: Iterable[Request]) -> None:
        """Gives back what no row of these requests reads any more: all before the window of the newest row's first
        token."""
        if self.pool.window == NO_WINDOW:  # every step asks, with all that runs
            return
        for request in requests:
            self._slide(request, request.last_step if request.last_step >= 0 else None)

    def _slide(self, request: Request, last_step: int | None) -> None:
        first = request.num_passed_blocks
        num_passed = self._num_passed(request, len(request.block_ids), request.newest_row_start)
        if num_passed <= first:
            return
        passed = request.block_ids[first:num_passed]
        request.num_passed_blocks = num_passed
        if self.pool.windows.num_each:
            self.pool.windows.pass_by(passed, last_step)
            return
        request.block_ids[first:num_passed] = self.pool.passed(len(passed))
        self.pool.free(passed, last_step)

    def _num_passed(self, request: Request, num_blocks: int, position: int) -> int:
        """How many of the first `num_blocks` blocks of a request nothing reads from `position` on."""
        return min(self.pool.window.num_passed(position), num_blocks) if self._gives_back(request) else 0

    @staticmethod
    def _gives_back(request: Request) -> bool:
        """Whether `request` gives back what slid out. A prompt to be handed off keeps its blocks for that, one with
        helpers since they have its list of them, one whose KV is in doubt until it is hashed."""
        keeps = request.keeps_blocks or request.has_help or request.is_doubtful
        return request.prompt.mode != "prefill" and not keeps

    def grow(self, request: Request, num_tokens: int, for_anybody: bool = False) -> bool:
        """Gives `request` blocks for `num_tokens` tokens in all, if need be after other holds of blocks gave theirs
        back. `for_anybody`: other nodes may write them, too. False, and no change to the request, when there are too
        few."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        began = self._now()
        self.pool.reservations.make_room(self.pool.cost(missing), Kind.RUN)
        blocks = self.pool.allocate_grantable(missing) if for_anybody else self.pool.allocate(missing)
        self.seconds += self._now() - began
        if blocks is None:
            return False
        request.block_ids += blocks
        return True

    def detach(self, request: Request) -> list[int]:
        """Takes all blocks from `request` without freeing them: the caller does, or hands them on. What is verified of
        a prompt that several nodes could not bring to its end can be found by its next attempt."""
        has_run = self.pool.has_completed(request.last_step)
        self._register(request, request.num_verified_tokens, None if has_run else request.last_step)
        request.num_verified_tokens = 0
        copy = self._copies.pop(request, None)
        if copy is not None:
            self.pool.free([copy.source], None)
        blocks, request.block_ids = request.block_ids, []
        request.num_computed_tokens = request.num_registered_blocks = request.num_table_blocks = 0
        request.num_passed_blocks = request.num_table_passed = request.newest_row_start = 0
        return blocks

    def release(self, request: Request) -> None:
        """Frees all blocks of `request`. Those that it gave back on its way come behind them in the free queue, where
        they stood in the order in which they passed: with the first of a chain all of it would be lost."""
        passed = request.block_hashes[: request.num_passed_blocks]
        self._free(request, request.last_step)
        if self.pool.windows.num_each:
            return
        kept = self.pool.match_prefix(list(takewhile(lambda each: not self.pool.goes_first(each), passed)))
        self.pool.touch(kept)
        self.pool.free(kept, None)

    def _free(self, request: Request, last_step: int | None) -> None:
        num_passed = request.num_passed_blocks if self.pool.windows.num_each else 0
        self.pool.free(self.detach(request), last_step, num_passed)

    def check_writable(self, request: Request, start: int, end: int) -> None:
        """Asserts that `request` alone holds the blocks of positions start … end-1, and that none is cached."""
        for index in range(start // self.block_size, self.num_blocks_for(end)):
            block_id = request.block_ids[index]
            assert self.pool.is_writable(block_id), f"{request.key} would write the shared or cached block {block_id}"

    def window_ids(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """A list for each of the window blocks that a block has: those of `request`, the null block where it has none,
        since no row of it reads any. (): no block has any."""
        windows, nulls = self.pool.windows, (self.pool.null_block,) * self.pool.windows.num_each
        if not nulls:
            return ()
        passed = request.num_passed_blocks
        columns = [windows.of(each) if i >= passed else nulls for i, each in enumerate(request.block_ids)]
        return tuple(zip(*(column or nulls for column in columns), strict=True))

    # --- forks ----------------------------------------------------------------------------------------------

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """`child` shares the blocks of the first `num_tokens` tokens; a partial last one is copied before the next
        forward pass (`take_copies`). False and no change when no block is left for that copy."""
        num_full, num_tail_tokens = divmod(num_tokens, self.block_size)
        tail = self.pool.allocate(1 if num_tail_tokens else 0)
        if tail is None:
            return False
        child.block_ids = parent.block_ids[:num_full]
        self.pool.touch(child.block_ids, parent.num_passed_blocks)
        if tail:
            source = parent.block_ids[num_full]
            self.pool.touch([source])
            self._copies[child] = PendingCopy(source, tail[0], num_tail_tokens)
        child.block_ids += tail
        child.num_registered_blocks = min(parent.num_registered_blocks, num_full)
        child.num_passed_blocks = parent.num_passed_blocks
        return True

    def take_copies(self, step_id: int) -> tuple[BlockCopy, ...]:
        """Copies that step `step_id` does before its forward pass.

        Sources are given back only now, when this step's blocks are all allocated: no copy's source is another's
        destination, so the copies of one step may run in any order.
        """
        copies = tuple(
            BlockCopy(source, destination, copy.num_tokens)
            for copy in self._copies.values()
            for source, destination in self.pool.windows.pairs(copy.source, copy.destination)
        )
        for child, copy in self._copies.items():
            child.last_step = step_id
            self.pool.free([copy.source], step_id)
        self._copies.clear()
        return copies

    def fragmentation(self, requests: Sequence[Request]) -> float:
        """The share of these requests' KV slots that hold no token, window blocks left out."""
        size, null = self.block_size, self.pool.null_block
        num_null = sum(r.num_passed_blocks for r in requests if r.block_ids and r.block_ids[0] == null)
        num_blocks = sum(len(request.block_ids) for request in requests) - num_null
        num_tokens = sum(min(r.num_computed_tokens, len(r.block_ids) * size) for r in requests) - num_null * size
        return 1 - num_tokens / (num_blocks * self.block_size) if num_blocks else 0.0

    def references(self, requests: Sequence[Request]) -> Counter[int]:
        """block_id -> references that `requests` and pending copies hold (for integrity checks)."""
        counts = Counter(block_id for request in requests for block_id in request.block_ids)
        counts.update(copy.source for copy in self._copies.values())
        for child, copy in self._copies.items():
            assert copy.destination in child.block_ids, "a copy goes to a block that its request does not hold"
        for request in requests:
            nulls = [place for place, block_id in enumerate(request.block_ids) if block_id == self.pool.null_block]
            num_null = 0 if self.pool.windows.num_each else request.num_passed_blocks
            assert nulls == list(range(num_null)), f"{request.key} lacks a block in its middle"
            needs = self.pool.window.num_passed(request.num_computed_tokens)
            assert request.num_passed_blocks <= needs, f"{request.key} gave back what it reads"
        return counts
