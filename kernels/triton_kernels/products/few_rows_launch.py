"""Launches few_rows_attention.py: tile sizes and strides."""

from __future__ import annotations

from typing import Any

import torch

from tandem.kernels.products.few_rows_scratch import MOST_ROWS, Scratch
from tandem.kernels.products.fused_ops import CacheSlots, HeadNorms
from tandem.kernels.triton_kernels.common import next_power_of_2, overlap, tile_of
from tandem.kernels.triton_kernels.products.few_rows_attention import few_rows_attention_kernel

LARGEST_TILE = 64  # a guess
# In rows of 4 programs that merge a query head each are faster, in rows of 8 those that merge all of a KV head: 6.8 us
# in place of 7.7 at 250 tokens. Of a head 4 or 16 runs at once take 1 and 5 % more time than 8; of a group a guess.
# (docs/measurements.md#merging-without-a-counter)
MOST_MERGERS = 128
WORDS_OF_HEAD, WORDS_OF_GROUP = 1024, 2048  # of runs, that such a program loads together


def attention_constants(
    num_rows: int, num_kv_heads: int, group: int, head_size: int, block_size: int, *, has_norm: bool
) -> dict[str, Any]:
    heads = 1 if num_rows * num_kv_heads * group <= MOST_MERGERS else group
    width = next_power_of_2(heads * head_size)
    chunk = max((WORDS_OF_HEAD if heads == 1 else WORDS_OF_GROUP) // width, 1)
    return {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "M_PAD": 16,
        "HEADS": heads, "CHUNK": chunk, "WIDTH": width, "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size, "TILE": tile_of(block_size, LARGEST_TILE), "MOST_ROWS": MOST_ROWS,
        "HAS_NORM": has_norm,
        "num_warps": 4, "num_stages": 2,
    }  # fmt: skip


def launch_attention(
    output_RHD: torch.Tensor,
    scratch: Scratch,
    qkv_RC: torch.Tensor,
    cos_sin_PD: torch.Tensor,
    block_tables_RB: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots: CacheSlots,
    scale: float,
    norms: HeadNorms | None,
) -> None:
    key_cache = slots.key_cache
    (num_rows, num_heads, head_size), num_kv_heads, block_size = (
        output_RHD.shape,
        key_cache.shape[1],
        key_cache.shape[2],
    )
    group = num_heads // num_kv_heads
    constants = attention_constants(num_rows, num_kv_heads, group, head_size, block_size, has_norm=norms is not None)
    few_rows_attention_kernel[(scratch.programs + num_rows * num_heads // constants["HEADS"],)](
        output_RHD, scratch.partial, qkv_RC, cos_sin_PD,
        norms and norms.q_weight, norms and norms.k_weight, key_cache, slots.value_cache, block_tables_RB, seq_lens_R,
        slots.slot_mapping, scale, norms.eps if norms else 0.0, num_rows,
        scratch.programs - num_rows * num_kv_heads, qkv_RC.stride(0),
        *key_cache.stride()[:3], block_tables_RB.stride(0),
        **constants,
        **overlap(qkv_RC.device),
    )  # fmt: skip
