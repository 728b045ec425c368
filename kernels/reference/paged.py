"""Eager twins of attention and of what moves blocks, one token and one head at a time, written for reading. Tests
compare against these.

Pass float64 tensors for results exact enough to judge bf16, fp16 and fp32 kernels by. Everything runs on any device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

FP8_LARGEST = 448.0


def attend_token(
    query_D: torch.Tensor,
    keys_SD: torch.Tensor,
    values_SD: torch.Tensor,
    query_position: int,
    scale: float,
    *,
    slope: float = 0.0,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    sink: float | None = None,
    causal: bool = True,
    first_seen: int = 0,
    visible: Sequence[int] | None = None,
) -> torch.Tensor:
    """One query of one head over keys at positions 0 … S-1 -> [D], from `first_seen` on. `visible` further restricts
    the positions."""
    positions = []
    for position in range(keys_SD.shape[0]):
        hidden = position < first_seen or (causal and position > query_position)
        hidden = hidden or (window is not None and position <= query_position - window)
        hidden = hidden or (chunk is not None and position // chunk != query_position // chunk)
        hidden = hidden or (visible is not None and position not in visible)
        if not hidden:
            positions.append(position)
    if not positions:
        return torch.zeros_like(query_D)
    scores = (keys_SD[positions] @ query_D) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    distances = torch.tensor([p - query_position for p in positions], dtype=scores.dtype, device=scores.device)
    scores = scores + slope * distances
    highest = scores.max() if sink is None else max(scores.max(), scores.new_tensor(sink))
    weights = torch.exp(scores - highest)
    total = weights.sum() if sink is None else weights.sum() + torch.exp(sink - highest)
    return (weights / total) @ values_SD[positions]


def sparse_positions(
    query_position: int,
    head: int,
    num_heads: int,
    num_kv_heads: int,
    local_blocks: int,
    vert_stride: int,
    block_size: int,
    head_sliding_step: int,
    tp_rank: int,
) -> list[int]:
    """Positions up to `query_position` that a head sees under the block-sparse pattern (see spec.BlockSparse)."""
    if head_sliding_step >= 0:
        shift = (tp_rank * num_heads + head) * head_sliding_step + 1
    else:
        kv_head = head // (num_heads // num_kv_heads)
        shift = (tp_rank * num_kv_heads + kv_head) * -head_sliding_step + 1
    own_block = query_position // block_size
    seen = []
    for position in range(query_position + 1):
        block = position // block_size
        if block > own_block - local_blocks or (block + shift) % vert_stride == 0:
            seen.append(position)
    return seen


def read_sequence(
    cache: torch.Tensor,
    block_table: Sequence[int],
    num_tokens: int,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Tokens 0 … num_tokens-1 of one sequence from a cache [num_blocks, K, S, D] -> [num_tokens, K, D], dequantized."""
    block_size = cache.shape[2]
    rows = [cache[int(block_table[p // block_size]), :, p % block_size] for p in range(num_tokens)]
    if not rows:
        return torch.empty(0, cache.shape[1], cache.shape[3], dtype=dtype or cache.dtype, device=cache.device)
    tokens = torch.stack([row.to(torch.float64) for row in rows]) * scale
    return tokens.to(dtype or torch.float64)


def paged_decode(
    query_NHD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    scale: float,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    slopes: Sequence[float] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    sinks: Sequence[float] | None = None,
    first_seen: int = 0,
    sparse: dict[str, int] | None = None,
) -> torch.Tensor:
    """Twin of the decode kernels (V1 and V2 give the same numbers): [N, H, D] in the query's dtype."""
    output = torch.zeros_like(query_NHD)
    num_heads, num_kv_heads = query_NHD.shape[1], key_cache.shape[1]
    for row, length in enumerate(seq_lens):
        keys = read_sequence(key_cache, block_tables[row], length, k_scale, query_NHD.dtype)
        values = read_sequence(value_cache, block_tables[row], length, v_scale, query_NHD.dtype)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            visible = None if sparse is None else sparse_positions(length - 1, head, num_heads, num_kv_heads, **sparse)
            output[row, head] = attend_token(
                query_NHD[row, head],
                keys[:, kv_head],
                values[:, kv_head],
                length - 1,
                scale,
                slope=0.0 if slopes is None else slopes[head],
                window=window,
                soft_cap=soft_cap,
                chunk=chunk,
                sink=None if sinks is None else sinks[head],
                first_seen=first_seen,
                visible=visible,
            )
    return output


def shared_prefix_decode(
    query_NHD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    seq_lens: Sequence[int],
    scale: float,
    groups: Sequence[tuple[Sequence[int], int]],
    **options: Any,
) -> torch.Tensor:
    """Twin of decode over shared prefixes: the rows of each group (rows, blocks) find their first `blocks` blocks in
    the first row's table, whatever their own say. Options as for paged_decode."""
    tables = [list(table) for table in block_tables]
    for rows, num_blocks in groups:
        for row in rows:
            tables[row][:num_blocks] = block_tables[rows[0]][:num_blocks]
    return paged_decode(query_NHD, key_cache, value_cache, tables, seq_lens, scale, **options)


def paged_prefill(
    query_THD: torch.Tensor,
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: Sequence[Sequence[int]],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    scale: float,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    slopes: Sequence[float] | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
    sinks: Sequence[float] | None = None,
    first_seen: int = 0,
) -> torch.Tensor:
    """Twin of the prefill kernel: new tokens attend to the cached prefix and causally to each other -> [T, H, D]."""
    output = torch.zeros_like(query_THD)
    num_heads, num_kv_heads = query_THD.shape[1], key_TKD.shape[1]
    first = 0
    for row, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        earlier, last = total - new, first + new
        old_keys = read_sequence(key_cache, block_tables[row], earlier, k_scale, query_THD.dtype)
        old_values = read_sequence(value_cache, block_tables[row], earlier, v_scale, query_THD.dtype)
        keys = torch.cat((old_keys, key_TKD[first:last].to(query_THD.dtype)))
        values = torch.cat((old_values, value_TKD[first:last].to(query_THD.dtype)))
        for token in range(new):
            for head in range(num_heads):
                kv_head = head // (num_heads // num_kv_heads)
                output[first + token, head] = attend_token(
                    query_THD[first + token, head],
                    keys[:, kv_head],
                    values[:, kv_head],
                    earlier + token,
                    scale,
                    slope=0.0 if slopes is None else slopes[head],
                    window=window,
                    soft_cap=soft_cap,
                    chunk=chunk,
                    sink=None if sinks is None else sinks[head],
                    first_seen=first_seen,
                )
        first = last
    return output


def write_to_paged_cache(
    key_TKD: torch.Tensor,
    value_TKD: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: Sequence[int],
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> int:
    """Twin of the write kernel, token by token. Returns how many values an fp8 cache had to saturate."""
    block_size = key_cache.shape[2]
    num_saturated = 0
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        for source, cache, scale in ((key_TKD, key_cache, k_scale), (value_TKD, value_cache, v_scale)):
            row = source[token]
            if cache.dtype == torch.float8_e4m3fn:
                scaled = row.float() / scale
                num_saturated += int((scaled.abs() > FP8_LARGEST).sum())
                row = scaled.clamp(-FP8_LARGEST, FP8_LARGEST).to(cache.dtype).view(torch.uint8)
                cache = cache.view(torch.uint8)
            cache[slot // block_size, :, slot % block_size] = row.to(cache.dtype)
    return num_saturated


def copy_blocks(pool: torch.Tensor, src_ids: Sequence[int], dst_ids: Sequence[int], counts: Sequence[int]) -> None:
    """Twin of the block copy kernel, slot by slot."""
    for source, destination, count in zip(src_ids, dst_ids, counts, strict=True):
        for slot in range(count):
            pool[destination, :, :, :, slot] = pool[source, :, :, :, slot]


def move_blocks(
    source: torch.Tensor, target: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range, counts: Sequence[int]
) -> None:
    """Twin of the kernel that moves blocks between pools, slot by slot and layer by layer."""
    for (block, other), count in zip(pairs, counts, strict=True):
        for layer in layers:
            for slot in range(count):
                target[other, :, layer, :, slot] = source[block, :, layer, :, slot]


def alibi_slopes(num_heads: int) -> list[float]:
    """The usual geometric slopes (Press et al., "Train short, test long"), for powers of two and other head counts."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    extra = [2 ** (-4 * (2 * i + 1) / power) for i in range(num_heads - power)]
    return slopes + extra
