"""Carries out what plan.py planned: puts blocks of this node's pool together as a sink wants them, in its block size
and dtype, with all heads, which may lie in several ranks' GPU pools.

The results are staged: the transports move a staged block as if it were one of a pool like the sink's. Legend:
base.py's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.device.saturation import saturated_blocks
from tandem.engine.scheduling.step import WrittenSlots
from tandem.kernels.blocks.digest import block_digests, last_of_piece
from tandem.kernels.blocks.quantization import FP8_DTYPE, as_bytes, dequantize, quantize
from tandem.kv_connector.layouts.geometry import BlockGeometry
from tandem.kv_connector.layouts.plan import Part, ReshapePlan, StoredEncoding, plan
from tandem.kv_connector.layouts.rank_pools import RankPools

# Bytes staged at a time, by device, unless one block is larger. On a GPU each stage is a handful of launches, so it
# should take a long chunk.
STAGED_BYTES = {"cpu": 32 << 20, "cuda": 128 << 20}


class Reshaper:
    """Converts blocks for all sinks of one layout. The next call of `stage` overwrites what the last one returned, on
    CUDA in the order of the current stream, so the same stream must do the reading."""

    def __init__(
        self, pool_NHLPBD: torch.Tensor, source: KVLayout, sink: KVLayout, ranks: RankPools | None = None
    ) -> None:
        """`ranks` has the blocks if they are not whole in `pool_NHLPBD`."""
        self.plan = plan(source, sink)
        self.geometry = BlockGeometry(sink, sink.payload_bytes)
        self.num_last = sink.group.blocks_each  # blocks at the end that may be partly filled
        self.max_blocks = max(1, STAGED_BYTES[pool_NHLPBD.device.type] // sink.payload_bytes)
        self._pool_NHLPBD, self._ranks = pool_NHLPBD, ranks
        self._convert = NumberConverter(self.plan, pool_NHLPBD.device)
        group = sink.group
        self._block_shape = (group.num_kv_heads, group.num_layers, group.num_planes, sink.block_size, group.head_dim)
        self._staged_nHLPBD: torch.Tensor | None = None

    def parts(
        self, job_block_ids: Sequence[int], first_slots: Sequence[int], num_valid: Sequence[int]
    ) -> list[list[Part]]:
        """The parts of each sink block of a transfer thread's job (kv_connector/protocol/jobs.py names the
        arguments)."""
        slots = first_slots or (0,) * len(num_valid)
        return self.plan.block_sizes.parts(job_block_ids, slots, num_valid)

    def stage(
        self, blocks: Sequence[Sequence[Part]], layers: range | None = None, *, again: bool = False
    ) -> torch.Tensor:
        """Returns [max_blocks, H, L, P, B, D] in the sink's layout (fp8 as uint8), whose block i is made of
        `blocks[i]`, in `layers` (None: all); everything else in it is undefined. On CUDA asynchronous, on the current
        stream. `again` says that these blocks were staged before, so that numbers that overflow are not counted
        twice."""
        assert len(blocks) <= self.max_blocks, "more blocks than fit"
        if self._staged_nHLPBD is None:
            shape, device = (self.max_blocks, *self._block_shape), self._pool_NHLPBD.device
            self._staged_nHLPBD = torch.empty(shape, dtype=self._convert.dtype, device=device)
        if self._ranks is not None and self.plan.keeps_blocks:
            self._ranks.gather([block_id for ((block_id, *_),) in blocks], layers, as_bytes(self._staged_nHLPBD))
            return as_bytes(self._staged_nHLPBD)
        pool_NHLPBD = self._pool_NHLPBD
        if self._ranks is not None:
            pool_NHLPBD, blocks = self._gathered(self._ranks, blocks, layers)
        span = slice(None) if layers is None else slice(layers.start, layers.stop)
        ours, theirs = pool_NHLPBD[:, :, span], self._staged_nHLPBD[:, :, span]
        alike: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
        for index, parts in enumerate(blocks):
            for block_id, source_slot, sink_slot, num_slots in parts:
                alike[source_slot, sink_slot, num_slots].append((block_id, index))
        for (source_slot, sink_slot, num_slots), pairs in alike.items():
            source = ours[:, :, :, :, source_slot : source_slot + num_slots]
            self._copy(source, theirs[:, :, :, :, sink_slot : sink_slot + num_slots], pairs, span, again)
        return as_bytes(self._staged_nHLPBD)

    def digests(self, blocks: Sequence[Sequence[Part]], key: int, num_valid_last: int) -> torch.Tensor:
        """Digests (kernels/blocks/digest.py) of these sink blocks as they will arrive, int64 [n]. Of the last
        `num_last` so many slots are valid. Stages them once more."""
        made, block_size = [], self.geometry.block_size
        for first in range(0, len(blocks), self.max_blocks):
            places = range(first, min(first + self.max_blocks, len(blocks)))
            staged = self.stage(blocks[first : places.stop], again=True)
            num_last = last_of_piece(places, len(blocks), self.num_last)
            made.append(
                block_digests(
                    staged, range(len(places)), key, num_valid_last, block_size, positions=places, num_last=num_last
                )
            )
        return torch.cat(made)

    def saturates(self, blocks: Sequence[Sequence[Part]], num_valid: Sequence[int]) -> bool:
        """Whether these sink blocks, of which so many slots are valid, hold values that fp8 can't. Stages them once
        more, and waits for the device."""
        if self._convert.dtype != FP8_DTYPE:
            return False
        for first in range(0, len(blocks), self.max_blocks):
            portion = slice(first, first + self.max_blocks)
            staged = self.stage(blocks[portion], again=True)
            if saturated_blocks(staged, [WrittenSlots(i, 0, n) for i, n in enumerate(num_valid[portion])]):
                return True
        return False

    def _gathered(
        self, ranks: RankPools, blocks: Sequence[Sequence[Part]], layers: range | None
    ) -> tuple[torch.Tensor, list[list[Part]]]:
        """Gathers the blocks of this node that `blocks` names: returns them, and `blocks` with indices into them."""
        index_of: dict[int, int] = {}
        moved = [
            [p._replace(source_block=index_of.setdefault(p.source_block, len(index_of))) for p in b] for b in blocks
        ]
        whole_nHLPBD = ranks.new_blocks(len(index_of))
        ranks.gather(list(index_of), layers, whole_nHLPBD)
        return whole_nHLPBD.view(self._pool_NHLPBD.dtype), moved

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: slice, again: bool
    ) -> None:
        if not source.is_cuda:
            for block, index in pairs:
                target[index].copy_(self._convert(source[block], layers, again))
            return
        listed = torch.tensor(pairs, dtype=torch.int64).pin_memory().to(source.device, non_blocking=True)
        blocks, indices = listed.unbind(1)
        taken = as_bytes(source).index_select(0, blocks).view(source.dtype)
        as_bytes(target).index_copy_(0, indices, as_bytes(self._convert(taken, layers, again)))


class NumberConverter:
    """Converts numbers from one stored encoding to another; `dtype` is that of the result."""

    def __init__(self, plan: ReshapePlan, device: torch.device) -> None:
        self.dtype: torch.dtype = getattr(torch, plan.sink_numbers.dtype)
        self._is_same = plan.source_numbers == plan.sink_numbers
        self._source_scale_LP11, self._sink_scale_LP11 = (
            _scales(numbers, plan.num_layers, device) for numbers in (plan.source_numbers, plan.sink_numbers)
        )

    def __call__(self, values: torch.Tensor, layers: slice, again: bool) -> torch.Tensor:
        """Converts `values` [..., l, P, slots, D] of `layers`. To fp8 as a node does that stores it itself: numbers
        that are too large saturate and are counted, unless `again`."""
        if self._is_same:
            return values
        if values.dtype == FP8_DTYPE:
            values = dequantize(values, self._source_scale_LP11[layers], torch.float32)
        if self.dtype == FP8_DTYPE:
            return quantize(values, self._sink_scale_LP11[layers], counts=not again)
        return values.to(self.dtype)


def _scales(numbers: StoredEncoding, num_layers: int, device: torch.device) -> torch.Tensor:
    """The scales as float32 [num_layers, 2 (K and V), 1, 1]."""
    ones = (1.0,) * num_layers
    both = (numbers.k_scales or ones, numbers.v_scales or ones)
    return torch.tensor(both, dtype=torch.float32).T.reshape(num_layers, 2, 1, 1).to(device)
