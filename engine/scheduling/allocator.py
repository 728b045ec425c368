"""The blocks of requests: growth, prefix hits, hashes of full blocks, copies of forked tail blocks, release."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
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

    def __init__(self, pool: BlockPool, hasher: BlockHasher, now: Callable[[], float] = lambda: 0.0) -> None:
        self.pool = pool
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
        return self.pool.match_prefix(self.reusable_hashes(request))

    def num_cached_tokens(self, request: Request) -> int:
        """The number of tokens that `cached_prefix` holds. A few look-ups suffice, since the pool never holds a block
        without those before it."""
        hashes, find = self.reusable_hashes(request), self.pool.find
        return self.block_size * bisect.bisect_left(hashes, True, key=lambda each: find(each) is None)

    def reusable_hashes(self, request: Request) -> list[bytes]:
        """Hashes of the blocks that `request` may take from a cache, wherever that is."""
        if not self.pool.enable_caching or not request.prompt.use_prefix_cache or request.needs_prompt_logprobs:
            return []
        self.extend_hashes(request)
        return request.block_hashes[: (request.num_tokens - 1) // self.block_size]

    def register_full_blocks(self, request: Request, step: int | None) -> None:
        """Makes every block findable whose tokens are known and whose KV is there once `step` has run (None: now)."""
        if not self.pool.enable_caching or request.is_doubtful or request.leaves_nothing:
            return
        num_full = min(request.num_computed_tokens, request.num_tokens) // self.block_size
        if num_full <= request.num_registered_blocks:
            return
        self.extend_hashes(request)
        num_public = self._hasher.num_public_blocks(request.prompt.secrecy)
        for index in range(request.num_registered_blocks, num_full):
            parent = request.block_hashes[index - 1] if index else None
            tenant = tenant_of_block(index, num_public, request.prompt.secrecy.salt)
            self.pool.register(request.block_ids[index], request.block_hashes[index], parent, step, tenant)
        request.num_registered_blocks = num_full

    # --- growth and release ---------------------------------------------------------------------------------

    def num_missing_blocks(self, request: Request) -> int:
        """How many blocks the launched tokens of `request` need beyond those it has."""
        return max(0, self.num_blocks_for(request.num_launched_tokens) - len(request.block_ids))

    def num_blocks_for_beams(self, request: Request) -> int:
        """How many blocks all beams of `request` may need at their longest, when they share its prompt's full blocks
        alone; 0: it has none."""
        num_shared = request.num_prompt_tokens // self.block_size
        width = request.prompt.sampling.beam_width if request.beams is not None else 0
        return width and num_shared + width * (self.num_blocks_for(request.max_num_tokens) - num_shared)

    def why_too_large(self, request: Request) -> str:
        """Why `request` can't ever run in this pool, for people; "" when it can."""
        num_blocks, num_for_beams = self.num_blocks_for(request.num_tokens), self.num_blocks_for_beams(request)
        if num_blocks > self.pool.num_blocks:
            return f"the prompt needs {num_blocks} KV blocks and the pool has {self.pool.num_blocks}"
        if num_for_beams > self.pool.num_blocks:
            return (
                f"{request.prompt.sampling.beam_width} beams of {request.max_num_tokens} tokens need {num_for_beams} "
                f"KV blocks and the pool has {self.pool.num_blocks}: lower beam_width or max_tokens"
            )
        return ""

    def num_future_blocks(self, request: Request) -> int:
        """`num_missing_blocks`; of a sequence that carries a beam those of all tokens that it may have: when it lacks
        one, its siblings wait as well. Before the first step it is all beams'."""
        if request.beams is None:
            return self.num_missing_blocks(request)
        if request.beams.num_tokens:
            return self.num_blocks_for(request.max_num_tokens) - len(request.block_ids)
        return self.num_blocks_for_beams(request) - len(request.block_ids)

    def start(self, request: Request, hits: list[int], num_external_tokens: int) -> bool:
        """Gives a request without blocks its cached prefix and, for tokens to be loaded, blocks that may be written
        from outside. False and no change when there are too few."""
        assert not request.block_ids
        began = self._now()
        self.pool.touch(hits)
        num_computed_tokens = len(hits) * self.block_size + num_external_tokens
        num_loaded = self.num_blocks_for(num_computed_tokens) - len(hits)
        loaded = self.pool.allocate_grantable(num_loaded)
        self.seconds += self._now() - began
        if loaded is None:
            self.pool.free(hits, None)
            return False
        request.block_ids = hits + loaded
        request.num_computed_tokens = num_computed_tokens
        request.num_registered_blocks = len(hits)
        return True

    def grow(self, request: Request, num_tokens: int, for_anybody: bool = False) -> bool:
        """Gives `request` blocks for `num_tokens` tokens in all, if need be after other holds of blocks gave theirs
        back. `for_anybody`: other nodes may write them, too. False, and no change to the request, when there are too
        few."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        began = self._now()
        self.pool.reservations.make_room(missing, Kind.RUN)
        blocks = self.pool.allocate_grantable(missing) if for_anybody else self.pool.allocate(missing)
        self.seconds += self._now() - began
        if blocks is None:
            return False
        request.block_ids += blocks
        return True

    def detach(self, request: Request) -> list[int]:
        """Takes all blocks from `request` without freeing them: the caller does, or hands them on."""
        copy = self._copies.pop(request, None)
        if copy is not None:
            self.pool.free([copy.source], None)
        blocks, request.block_ids = request.block_ids, []
        request.num_computed_tokens = request.num_registered_blocks = request.num_table_blocks = 0
        return blocks

    def release(self, request: Request) -> None:
        self.pool.free(self.detach(request), request.last_step)

    def check_writable(self, request: Request, start: int, end: int) -> None:
        """Asserts that `request` alone holds the blocks of positions start … end-1, and that none is cached."""
        for index in range(start // self.block_size, self.num_blocks_for(end)):
            block_id = request.block_ids[index]
            assert self.pool.is_writable(block_id), f"{request.key} would write the shared or cached block {block_id}"

    # --- forks ----------------------------------------------------------------------------------------------

    def fork(self, parent: Request, child: Request, num_tokens: int) -> bool:
        """`child` shares the blocks of the first `num_tokens` tokens; a partial last one is copied before the next
        forward pass (`take_copies`). False and no change when no block is left for that copy."""
        num_full, num_tail_tokens = divmod(num_tokens, self.block_size)
        tail = self.pool.allocate(1 if num_tail_tokens else 0)
        if tail is None:
            return False
        child.block_ids = parent.block_ids[:num_full]
        self.pool.touch(child.block_ids)
        if tail:
            source = parent.block_ids[num_full]
            self.pool.touch([source])
            self._copies[child] = PendingCopy(source, tail[0], num_tail_tokens)
        child.block_ids += tail
        child.num_registered_blocks = min(parent.num_registered_blocks, num_full)
        return True

    def take_copies(self, step_id: int) -> tuple[BlockCopy, ...]:
        """Copies that step `step_id` does before its forward pass.

        Sources are given back only now, when this step's blocks are all allocated: no copy's source is another's
        destination, so the copies of one step may run in any order.
        """
        copies = tuple(BlockCopy(c.source, c.destination, c.num_tokens) for c in self._copies.values())
        for child, copy in self._copies.items():
            child.last_step = step_id
            self.pool.free([copy.source], step_id)
        self._copies.clear()
        return copies

    def fragmentation(self, requests: Sequence[Request]) -> float:
        """The share of these requests' KV slots that hold no token."""
        num_blocks = sum(len(request.block_ids) for request in requests)
        num_tokens = sum(min(r.num_computed_tokens, len(r.block_ids) * self.block_size) for r in requests)
        return 1 - num_tokens / (num_blocks * self.block_size) if num_blocks else 0.0

    def references(self, requests: Iterable[Request]) -> Counter[int]:
        """block_id -> references that `requests` and pending copies hold (for integrity checks)."""
        counts = Counter(block_id for request in requests for block_id in request.block_ids)
        counts.update(copy.source for copy in self._copies.values())
        for child, copy in self._copies.items():
            assert copy.destination in child.block_ids, "a copy goes to a block that its request does not hold"
        return counts
