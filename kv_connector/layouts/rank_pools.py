"""The GPU pools of a node's ranks, as rank 0 uses them to move KV. Each rank has its heads of every block on its GPU.

Rank 0 maps the others' pools, and its GPU reads and writes them over NVLink, so one transfer thread and one set of
channels serve the node, and nothing that another rank runs has to be agreed on. Gathering puts the whole block
together in one place.
Legend: transports/base.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tandem.engine.contracts.kv_layout import KVLayout, kv_heads_of
from tandem.engine.parallel.peer_memory import RankMemory
from tandem.kernels.blocks.digest import block_digests, last_of_piece
from tandem.kernels.blocks.move_blocks import BlockPlaces, move_blocks, why_not_words
from tandem.kernels.blocks.push_blocks import list_pairs
from tandem.kernels.blocks.quantization import as_bytes

# Programs of a kernel that moves blocks: each takes a place on a multiprocessor from the computation. Digests may take
# more of them, since the end of a hand-off waits for its digests.
PROGRAMS, DIGEST_PROGRAMS = 16, 128  # guesses
GATHERED_BYTES = 64 << 20  # gathered at a time for digests and tiers; a guess
T = TypeVar("T")


@dataclass(frozen=True)
class RankPart:
    """One rank's pool, and which of a block's heads it has."""

    memory: RankMemory
    heads: range
    stride_bytes: int


class RankPools:
    """Gathers whole blocks from the ranks' pools and scatters them back. On CUDA every method enqueues its work on the
    current stream of rank 0's device and returns without waiting."""

    def __init__(self, own_NHLPBD: torch.Tensor, layout: KVLayout, memories: Sequence[RankMemory]) -> None:
        """`own_NHLPBD` is rank 0's pool and `layout` that of a whole block. All ranks have equally many heads; where
        there are fewer heads than ranks, neighbours hold the same. Raises ValueError for blocks that kernels can't
        move."""
        problem = why_not_words(own_NHLPBD)
        if problem:
            raise ValueError(problem)
        num_heads, num_all, num_ranks = own_NHLPBD.shape[1], layout.group.num_kv_heads, len(memories)
        heads_of_ranks = [kv_heads_of(rank, num_ranks, num_all) for rank in range(num_ranks)]
        assert all(len(heads) == num_heads for heads in heads_of_ranks), "equal shares, or copies of single heads"
        self.layout = layout
        self._own_NHLPBD = as_bytes(own_NHLPBD)
        stride_bytes = BlockPlaces.of(self._own_NHLPBD).block_bytes
        self.parts = [
            RankPart(memory, heads, stride_bytes) for memory, heads in zip(memories, heads_of_ranks, strict=True)
        ]
        self._sources = list({part.heads: part for part in reversed(self.parts)}.values())  # each head once
        self._block_shape = (layout.group.num_kv_heads, *self._own_NHLPBD.shape[2:])

    def new_blocks(self, num_blocks: int) -> torch.Tensor:
        """Room for gathered blocks: [num_blocks, H, L, P, B, D] (fp8 as uint8), with undefined content."""
        shape = (num_blocks, *self._block_shape)
        return torch.empty(shape, dtype=self._own_NHLPBD.dtype, device=self._own_NHLPBD.device)

    def gather(
        self, block_ids: Sequence[int], layers: range | None, out_nHLPBD: torch.Tensor, num_programs: int = PROGRAMS
    ) -> None:
        """Copies `layers` (None: all) of these blocks to the leading ones of `out_nHLPBD`."""
        size = self.layout.block_size
        listed = self._listed([(block, index) for index, block in enumerate(block_ids)], [size] * len(block_ids))
        for part in self._sources:
            target = out_nHLPBD[:, part.heads.start : part.heads.stop]
            move_blocks(target, self._places(part), BlockPlaces.of(target), listed, layers, num_programs)

    def scatter(
        self, blocks_nHLPBD: torch.Tensor, block_ids: Sequence[int], layers: range | None, num_valid: Sequence[int]
    ) -> None:
        """Copies `layers` (None: all) of the first `num_valid[i]` slots of block i of `blocks_nHLPBD` to block
        `block_ids[i]`."""
        listed = self._listed(list(enumerate(block_ids)), num_valid)
        for part in self.parts:
            source = blocks_nHLPBD[:, part.heads.start : part.heads.stop]
            move_blocks(source, BlockPlaces.of(source), self._places(part), listed, layers, PROGRAMS)

    def digests(self, block_ids: Sequence[int], key: int, num_valid_last: int) -> torch.Tensor:
        """Digests of these blocks, int64 [n], equal to `block_digests` (kernels/blocks/digest.py) of a pool of whole
        blocks."""
        size, made, first = self.layout.block_size, [], 0
        for ids in self.pieces(block_ids):
            blocks = self.new_blocks(len(ids))
            self.gather(ids, None, blocks, DIGEST_PROGRAMS)
            places = range(first, first + len(ids))
            num_last = last_of_piece(places, len(block_ids), self.layout.group.blocks_each)
            made.append(
                block_digests(blocks, range(len(ids)), key, num_valid_last, size, positions=places, num_last=num_last)
            )
            first += len(ids)
        return torch.cat(made)

    def pieces(self, blocks: Sequence[T]) -> Iterator[Sequence[T]]:
        """Runs of `blocks` for which there is room at a time."""
        at_once = max(1, GATHERED_BYTES // self.layout.payload_bytes)
        return (blocks[first : first + at_once] for first in range(0, len(blocks), at_once))

    def _places(self, part: RankPart) -> BlockPlaces:
        return replace(BlockPlaces.of(self._own_NHLPBD), address=part.memory.address)

    def _listed(self, pairs: Sequence[tuple[int, int]], num_valid: Sequence[int]) -> torch.Tensor:
        return list_pairs(pairs, num_valid, (), self._own_NHLPBD.device)
