"""Attention over latents: the cache has one row a token, of which every head's key and value are made.

Source: DeepSeek-V2 (arXiv 2405.04434), multi-head latent attention. A row is a latent of L elements and a key part of
P elements, rotated, that all heads share. A matrix makes of the latent N more elements of each head's key and the V of
its value. Decode rows never make them: queries are multiplied by the keys' matrix instead, attend to the rows as they
lie in the cache, and the sum of latents that comes out is multiplied by the values' matrix. Prompts make keys and
values of all they see, since each is then used by many queries (docs/latent_attention.md).

Further letters: T new tokens, M rows of any kind, H heads, D = N + P, W the wider of D and V, S slots a block.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import PagedKV, Prefill
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.api.metadata import AttentionMetadata, RowBatch
from tandem.kernels.backends.gather import gather_blocks
from tandem.kernels.latents.new_rows import NewLatents, store_and_absorb, store_and_rotate, values_of
from tandem.kernels.reference import latents as twins

# Keys and values of earlier tokens that are made at once, in bytes, before heads take turns; a guess.
MADE_BYTES = 256 << 20


class Heads(NamedTuple):
    """What makes keys and values of latents, some heads of a layer."""

    key_HNL: torch.Tensor
    value_HVL: torch.Tensor

    @classmethod
    def of(cls, weight_OL: torch.Tensor, num_heads: int, key_width: int) -> Heads:
        both = weight_OL.view(num_heads, -1, weight_OL.shape[1])
        return cls(both[:, :key_width], both[:, key_width:])

    def some(self, heads: slice) -> Heads:
        return Heads(self.key_HNL[heads], self.value_HVL[heads])

    def keys_and_values(self, row_MR: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, [M, H, W] each, of M rows of the cache; zeros at the end of the narrower ones."""
        num_heads, key_width, latent_width = self.key_HNL.shape
        latent_ML, rotated_MP = row_MR.split((latent_width, row_MR.shape[1] - latent_width), dim=1)
        made = []
        for matrix in self:
            out = row_MR.new_zeros(len(row_MR), num_heads, width)
            out[..., : matrix.shape[1]] = torch.matmul(latent_ML, matrix.transpose(1, 2)).transpose(0, 1)
            made.append(out)
        made[0][..., key_width : key_width + rotated_MP.shape[1]] = rotated_MP[:, None]
        return made[0], made[1]


class _Earlier(NamedTuple):
    """Where the earlier tokens of prompt rows lie, and the same rows over keys and values that are made of them."""

    block_ids: torch.Tensor  # int64 [blocks of all rows]
    rows: RowBatch


def latent_attention(new: NewLatents, weight_OL: torch.Tensor, layer_name: str) -> torch.Tensor:
    """[T, H, V]: attention of one layer of the current forward pass, whose rows are stored first.

    `weight_OL` [H * (N + V), L]: of each head first what makes its key, then what makes its value. Hooks run as in
    `unified_attention`.
    """
    context = get_forward_context()
    layer, metadata = context.layer(layer_name), context.metadata_of(layer_name)
    cache = layer.kv_cache[context.virtual_engine]
    num_heads = new.query_THD.shape[1]
    rotated = new.cos_sin_CP.shape[1]
    heads = Heads.of(weight_OL, num_heads, new.query_THD.shape[2] - rotated)
    output_THV = new.query_THD.new_empty(len(new.query_THD), num_heads, heads.value_HVL.shape[1])
    if context.hooks is not None:
        context.hooks.wait_for_kv_layer(layer_name)
    if not cache.numel():
        output_THV.copy_(_in_full_heads(layer, None, *new.finished(), heads, metadata.all_rows()))
    else:
        _attend(layer, cache, new, heads, metadata, output_THV)
    if context.hooks is not None:
        context.hooks.save_kv_layer(layer_name, cache, metadata)
    return output_THV


def latent_store(new: NewLatents, layer_name: str) -> None:
    """Stores the rows of all T tokens, and nobody attends; queries may have no heads. Hooks run."""
    context = get_forward_context()
    layer, metadata = context.layer(layer_name), context.metadata_of(layer_name)
    cache = layer.kv_cache[context.virtual_engine]
    if context.hooks is not None:
        context.hooks.wait_for_kv_layer(layer_name)
    if new.is_fused and cache.numel():
        store_and_rotate(new, cache[:, 0, 0], metadata.slot_mapping)
    elif cache.numel():
        _, row_TR = new.finished()
        layer.store(row_TR[:, None], row_TR[:, None], cache, metadata)
    if context.hooks is not None:
        context.hooks.save_kv_layer(layer_name, cache, metadata)


def _attend(
    layer: Attention,
    cache: torch.Tensor,
    new: NewLatents,
    heads: Heads,
    metadata: AttentionMetadata,
    output_THV: torch.Tensor,
) -> None:
    """Fills `output_THV`. All rows are stored before the first attends."""
    num_decode = metadata.num_decode_rows
    decode, rest = slice(num_decode), slice(num_decode, None)
    has_prompts = num_decode < metadata.num_rows
    query_MHR = prompts = None
    if new.is_fused:
        rows, slots = cache[:, 0, 0], metadata.slot_mapping
        if num_decode:
            query_MHR = store_and_absorb(new.some(decode), heads.key_HNL, rows, slots[decode])
        if has_prompts:
            prompts = store_and_rotate(new.some(rest), rows, slots[rest])
    else:
        query_THD, row_TR = new.finished()
        layer.store(row_TR[:, None], row_TR[:, None], cache, metadata)
        query_MHR = twins.absorbed(query_THD[decode], heads.key_HNL) if num_decode else None
        prompts = (query_THD[rest], row_TR[rest]) if has_prompts else None
    if query_MHR is not None:
        summed_MHR = layer.decode(query_MHR, cache, metadata.decode_rows())
        values_of(summed_MHR[..., : heads.key_HNL.shape[2]], heads.value_HVL, output_THV[decode])
    if prompts is not None:
        output_THV[rest] = _in_full_heads(layer, cache, *prompts, heads, metadata.prefill_rows())


def _in_full_heads(
    layer: Attention,
    cache: torch.Tensor | None,
    query_THD: torch.Tensor,
    row_TR: torch.Tensor,
    heads: Heads,
    rows: RowBatch,
) -> torch.Tensor:
    """[T, H, V] of prompt rows. Heads take turns when what they need of earlier tokens is more than MADE_BYTES."""
    num_heads, width = query_THD.shape[1], max(query_THD.shape[2], heads.value_HVL.shape[1])
    query_THW = torch.nn.functional.pad(query_THD, (0, width - query_THD.shape[2]))
    output_THV = query_THD.new_empty(*query_THD.shape[:2], heads.value_HVL.shape[1])
    earlier, share, earlier_MR = None, num_heads, row_TR[:0]
    if cache is not None and rows.query_lens_cpu != rows.seq_lens_cpu:
        earlier = _earlier(rows, cache.shape[3])
        gathered = gather_blocks(cache[:, :, 0], layer.k_scale, earlier.block_ids[None], query_THD.dtype)
        earlier_MR = gathered.view(-1, cache.shape[4])
        share = _heads_at_once(num_heads, len(earlier_MR) * width * 2 * query_THD.element_size())
        rows = earlier.rows
    attention = layer.in_full_heads(share, width)
    for first in range(0, num_heads, share):
        some = slice(first, first + share)
        kv = None if earlier is None or cache is None else _made(heads.some(some), earlier_MR, width, cache.shape[3])
        key, value = heads.some(some).keys_and_values(row_TR, width)
        attended = attention.prefill(Prefill(query_THW[:, some].contiguous(), key, value, kv, rows))
        output_THV[:, some] = attended[..., : output_THV.shape[2]]
    return output_THV


def _earlier(rows: RowBatch, block_size: int) -> _Earlier:
    """Where the rows' earlier tokens lie; found once a step. Whole blocks are counted: keys and values of new tokens in
    the last block are made, too, and never looked at."""
    if "earlier" not in rows.scratch:
        earlier = [total - new for new, total in zip(rows.query_lens_cpu, rows.seq_lens_cpu, strict=True)]
        counts = [-(-length // block_size) for length in earlier]
        # Kernels are compiled for strides of 1 and for multiples of 16: these are always the latter.
        tables = np.zeros((len(counts), -(-max(counts) // 16) * 16), np.int32)
        for row, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
            tables[row, :count] = np.arange(start, start + count)
        block_ids = torch.cat([table[:count] for table, count in zip(rows.block_tables, counts, strict=True)]).long()
        made = RowBatch(
            rows.query_start_loc, rows.seq_lens, torch.from_numpy(tables).to(block_ids.device, non_blocking=True),
            rows.query_lens_cpu, rows.seq_lens_cpu, rows.max_query_len, rows.max_seq_len,
        )  # fmt: skip
        rows.scratch["earlier"] = _Earlier(block_ids, made)
    found: _Earlier = rows.scratch["earlier"]
    return found


def _heads_at_once(num_heads: int, head_bytes: int) -> int:
    """How many heads, a divisor of all, whose keys and values take up to MADE_BYTES."""
    while num_heads % 2 == 0 and num_heads * head_bytes > MADE_BYTES:
        num_heads //= 2
    return num_heads


def _made(heads: Heads, row_MR: torch.Tensor, width: int, block_size: int) -> PagedKV:
    """Keys and values of these rows, whole blocks of them, as a cache of their own, [M / S, H, 2, S, W]."""
    num_heads, num_blocks = len(heads.key_HNL), len(row_MR) // block_size
    made = row_MR.new_empty(num_blocks, num_heads, 2, block_size, width)
    for plane, each_MHW in enumerate(heads.keys_and_values(row_MR, width)):
        made[:, :, plane] = each_MHW.view(num_blocks, block_size, num_heads, width).transpose(1, 2)
    return PagedKV.of_layer(made)
