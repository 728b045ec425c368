"""Launches the kernels of decode steps of few rows: tile sizes and strides."""

from __future__ import annotations

from typing import Any

import torch
import triton

from tandem.kernels.few_rows import TILE_N, FewRowsPlan
from tandem.kernels.few_rows_attention import MOST_ROWS, Scratch
from tandem.kernels.fused_ops import CacheSlots, HeadNorms
from tandem.kernels.triton_kernels.common import overlap, tile_of
from tandem.kernels.triton_kernels.few_rows_attention import few_rows_attention_kernel
from tandem.kernels.triton_kernels.few_rows_product import few_rows_product_kernel

LARGEST_TILE = 64
RUNS_AT_ONCE = 16  # that are loaded together when they are merged


def attention_constants(
    num_kv_heads: int, group: int, head_size: int, block_size: int, *, has_norm: bool
) -> dict[str, Any]:
    rows = triton.next_power_of_2(group)
    return {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "M_PAD": max(8, rows), "ROWS": rows,
        "CHUNK": RUNS_AT_ONCE, "HEAD_SIZE": head_size,
        "BLOCK_SIZE": block_size, "TILE": tile_of(block_size, LARGEST_TILE), "MOST_ROWS": MOST_ROWS,
        "HAS_NORM": has_norm,
        "num_warps": 4, "num_stages": 3,
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
    few_rows_attention_kernel[(scratch.programs,)](
        output_RHD, scratch.partial, scratch.peaks, scratch.totals, scratch.arrivals, qkv_RC, cos_sin_PD,
        norms and norms.q_weight, norms and norms.k_weight, key_cache, slots.value_cache, block_tables_RB, seq_lens_R,
        slots.slot_mapping, scale, norms.eps if norms else 0.0, num_rows,
        scratch.programs - num_rows * num_kv_heads, qkv_RC.stride(0),
        *key_cache.stride()[:3], block_tables_RB.stride(0),
        **attention_constants(num_kv_heads, group, head_size, block_size, has_norm=norms is not None),
        **overlap(qkv_RC.device),
    )  # fmt: skip


def product_constants(
    plan: FewRowsPlan, num_inputs: int, *, has_bias: bool, silu: bool, normalises: bool, adds: bool
) -> dict[str, Any]:
    return {
        "TILE_K": plan.tile_k, "STEPS": num_inputs // (plan.tile_k * plan.warps), "STAGES": plan.stages,
        "HAS_BIAS": has_bias, "SILU": silu, "NORM": normalises, "ADD": adds, "num_warps": plan.warps,
    }  # fmt: skip


def launch_product(
    plan: FewRowsPlan,
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    out_MN: torch.Tensor,
    *,
    bias_N: torch.Tensor | None,
    silu: bool,
    norm: tuple[torch.Tensor, float] | None,
    adds: bool,
) -> None:
    """`norm` (gain [K], epsilon): of x, before the product. `silu`: gated, without bias. `adds`: to `out_MN`. Rows of
    x and weight start at multiples of 16 bytes."""
    (num_rows, num_inputs), num_outputs = x_MK.shape, weight_NK.shape[0]
    assert plan.is_valid(num_rows, num_outputs, num_inputs), f"{plan} for {num_rows} rows of {weight_NK.shape}"
    assert not (silu and (adds or bias_N is not None))
    gain_K, eps = norm or (weight_NK, 0.0)
    flags = {"has_bias": bias_N is not None, "silu": silu, "normalises": norm is not None, "adds": adds}
    few_rows_product_kernel[(plan.programs,)](
        x_MK, weight_NK, out_MN, weight_NK if bias_N is None else bias_N, gain_K, out_MN.shape[1],
        x_MK.stride(0), weight_NK.stride(0), out_MN.stride(0), num_rows, eps, num_outputs // TILE_N,
        launch_pdl=True, **product_constants(plan, num_inputs, **flags),
    )  # fmt: skip
