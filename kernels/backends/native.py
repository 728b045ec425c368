"""Native PyTorch attention: any device, any dtype, every option. The yardstick for correctness and the CPU backend.

Decode rows are gathered from the paged cache, padded to groups of similar length and computed as one attention call a
group; prefill rows are computed one sequence at a time in chunks of queries. Slots past a sequence's end may hold
anything, NaN included: they are masked out of the scores and zeroed in the values.
"""

from __future__ import annotations

import torch

from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedImpl, PagedKV, PagedOps, Prefill
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.dense import attend, bias_of, mask_of, plain_causal, sinks_of
from tandem.kernels.backends.gather import DecodeGroup, decode_groups, gather_blocks, read_prefix, write_to_cache

QUERY_CHUNK = 512  # queries of a prefill row that share one mask; a guess


class NativeOps(PagedOps):
    """Attention in plain PyTorch operations, decode rows in groups and prompts row by row."""

    write = staticmethod(write_to_cache)

    @staticmethod
    def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        groups = decode_groups(rows, kv.block_size)
        if len(groups) == 1:
            return _decode_group(query, kv, groups[0], spec)
        output = torch.empty_like(query)
        for group in groups:
            output[group.rows] = _decode_group(query[group.rows], kv, group, spec)
        return output

    @staticmethod
    def prefill(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        output, rows = torch.empty_like(new.q), new.rows
        start = 0
        for row, (length, total) in enumerate(zip(rows.query_lens_cpu, rows.seq_lens_cpu, strict=True)):
            tokens, earlier = slice(start, start + length), total - length
            start += length
            k, v = new.k[tokens], new.v[tokens]
            if earlier:
                if new.kv is None:
                    raise ValueError(f"row {row} has {earlier} earlier tokens, but no kv_cache holds them")
                k, v = _with_prefix(k, v, new.kv, rows.block_tables[row], earlier)
            output[tokens] = _attend_row(new.q[tokens], k, v, earlier, spec)
        return output


class NativeImpl(PagedImpl):
    """Adds to the paged flow what only this backend does: encoder and cross attention."""

    ops = NativeOps

    def _attend_both_ways(self, new: Prefill) -> torch.Tensor:
        output = torch.empty_like(new.q)
        start = 0
        for length in new.rows.query_lens_cpu:
            tokens = slice(start, start + length)
            output[tokens] = _attend_row(new.q[tokens], new.k[tokens], new.v[tokens], 0, self.spec, causal=False)
            start += length
        return output

    def _attend_cross(self, query: torch.Tensor, kv: PagedKV, rows: RowBatch) -> torch.Tensor:
        output = torch.zeros_like(query)
        start = 0
        for row, (new, length) in enumerate(zip(rows.query_lens_cpu, rows.seq_lens_cpu, strict=True)):
            tokens = slice(start, start + new)
            start += new
            if length:
                k, v = read_prefix(kv, rows.block_tables[row], length, query.dtype)
                output[tokens] = _attend_row(query[tokens], k, v, 0, self.spec, causal=False)
        return output


class NativeBackend(AttentionBackend):
    """PyTorch on any device with any floating point type; its decode can't be captured in a CUDA graph."""

    follows_captured_lengths = False
    serves_sinks = True
    serves_attention_chunks = True
    serves_latents = True

    @staticmethod
    def get_name() -> str:
        return "NATIVE"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return NativeImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return NativeOps

    @staticmethod
    def unavailable_reason() -> str | None:
        return None

    @staticmethod
    def unsupported_reason(
        device: torch.device, dtype: torch.dtype, head_size: int, options: AttentionSpec
    ) -> str | None:
        return None if dtype.is_floating_point else f"dtype {dtype} is no floating point type"


def _decode_group(query: torch.Tensor, kv: PagedKV, group: DecodeGroup, spec: AttentionSpec) -> torch.Tensor:
    """query [N, H, D] of the group's rows -> [N, H, D]."""
    num_rows, num_heads, head_size = query.shape
    key = gather_blocks(kv.key_cache, kv.k_scale, group.block_ids, query.dtype)
    value = gather_blocks(kv.value_cache, kv.v_scale, group.block_ids, query.dtype)
    group.zero_unused(key)
    group.zero_unused(value)
    shape = (num_rows, spec.num_kv_heads, spec.group_size, group.padded)
    allowed = group.allowed(spec)
    if allowed.shape[1] == num_heads:
        allowed = allowed.reshape(shape)
    bias = bias_of(spec, (group.lengths - 1)[:, None], group.positions, query.device)
    folded = query.reshape(num_rows, spec.num_kv_heads, spec.group_size, head_size)
    sinks = sinks_of(spec, query.device, (1, spec.num_kv_heads, spec.group_size, 1))
    output = attend(folded, key, value, allowed, None if bias is None else bias.reshape(shape), spec, sinks=sinks)
    return output.reshape(num_rows, num_heads, head_size)


def _attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_earlier: int,
    spec: AttentionSpec,
    causal: bool = True,
) -> torch.Tensor:
    """One sequence: query [L, H, D] at positions num_earlier …, key/value [S, K, D] -> [L, H, D]."""
    num_queries, _, head_size = query.shape
    q = query.reshape(num_queries, spec.num_kv_heads, spec.group_size, head_size).permute(1, 2, 0, 3)
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, spec.group_size, -1, -1) for x in (key, value))
    if plain_causal(spec, num_earlier, causal):
        sinks = sinks_of(spec, q.device, (spec.num_kv_heads, spec.group_size, 1, 1))
        out = attend(q, k, v, None, None, spec, is_causal=causal, sinks=sinks)
        return out.permute(2, 0, 1, 3).reshape(query.shape)
    output = torch.empty_like(query)
    for start in range(0, num_queries, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, num_queries)
        visible = num_earlier + stop if causal else key.shape[0]
        out = _attend_chunk(
            q[:, :, start:stop], k[:, :, :visible], v[:, :, :visible], num_earlier + start, spec, causal
        )
        output[start:stop] = out.permute(2, 0, 1, 3).reshape(stop - start, *query.shape[1:])
    return output


def _attend_chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first_position: int, spec: AttentionSpec, causal: bool
) -> torch.Tensor:
    """q [K, G, L, D] at positions first_position …, k/v [K, G, S, D] -> [K, G, L, D]."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    query_positions = torch.arange(first_position, first_position + num_queries, device=q.device)[None]
    positions = torch.arange(num_keys, device=q.device)
    seen = positions[None, None, :] <= query_positions[:, :, None]
    allowed = mask_of(spec, query_positions, positions, seen if causal else torch.ones_like(seen))
    if not causal and spec.sliding_window is not None:  # a window looks both ways when nothing else hides the future
        allowed = allowed & (positions < query_positions[:, None, :, None] + spec.sliding_window)
    bias = bias_of(spec, query_positions, positions, q.device)
    shape = (spec.num_kv_heads, spec.group_size, num_queries, num_keys)
    if allowed.shape[1] == spec.num_heads:
        allowed = allowed.reshape(shape)
    sinks = sinks_of(spec, q.device, (spec.num_kv_heads, spec.group_size, 1, 1))
    return attend(q, k, v, allowed, None if bias is None else bias.reshape(shape), spec, sinks=sinks)


def _with_prefix(
    key: torch.Tensor, value: torch.Tensor, kv: PagedKV, block_table: torch.Tensor, num_earlier: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The cached first `num_earlier` tokens followed by the new ones, [S, K, D]."""
    old_key, old_value = read_prefix(kv, block_table, num_earlier, key.dtype)
    return torch.cat((old_key, key)), torch.cat((old_value, value))
