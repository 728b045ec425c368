"""Prefill with our Triton kernels: the Hopper kernel where it fits, the general one for everything else."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from tandem.kernels.api.backend import PagedKV, Prefill
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.blocks.quantization import FP8_DTYPE, scale_tensor
from tandem.kernels.triton_kernels.gluon_support import why_no_gluon

if TYPE_CHECKING:
    from tandem.kernels.triton_kernels.prefill.unpack_prefix import UnpackedPrefixes

logger = logging.getLogger(__name__)

HOPPER = (9, 0)

_failures: list[str] = []
_warm: set[tuple[object, ...]] = set()


def prefill(new: Prefill, spec: AttentionSpec, causal: bool = True) -> torch.Tensor:
    """[T, H, D], as PagedOps.prefill.

    Not `causal`: without a cache an encoder's attention, both ways among the new tokens; else cross attention over the
    earlier tokens alone, by queries that count from the first of them.
    """
    kv = new.kv
    if why_general(new, spec) is None and (causal or _may_see_all(new, spec)):
        try:
            if kv is None or kv.key_cache.dtype != FP8_DTYPE:
                keys, values = (None, None) if kv is None else (kv.key_cache, kv.value_cache)
                return _launch_hopper(new, keys, values, new.rows.block_tables, spec, causal)
            output = _hopper_over_fp8(new, kv, spec)
            if output is not None:
                return output
        except Exception as error:
            if not type(error).__module__.startswith("triton."):
                raise
            _failures.append(f"the Hopper kernel failed to compile: {error}")
            logger.warning("%s; the general kernel serves from now on", _failures[-1])
    return _general(new, spec, causal)


def _may_see_all(new: Prefill, spec: AttentionSpec) -> bool:
    """Whether the Hopper kernel serves attention that isn't causal: cross attention over 16-bit caches, no window, keys
    for each row. Encoders, without a cache, have not been verified on a GPU with it: theirs is the general kernel."""
    if new.kv is None or new.kv.key_cache.dtype == FP8_DTYPE or spec.reach.kind:
        return False
    return all(total > own for own, total in zip(new.rows.query_lens_cpu, new.rows.seq_lens_cpu, strict=True))


def why_general(new: Prefill, spec: AttentionSpec) -> str | None:
    """Why the general kernel serves such tensors instead of the Hopper one, or None."""
    query, key, value, kv, _ = new
    reason = why_general_layer(query.device, query.dtype, spec) or (_failures[0] if _failures else None)
    if reason is not None:
        return reason
    from tandem.kernels.triton_kernels.prefill.prefill_launch import why_not_cache, why_not_tiles

    if key.dtype != query.dtype or value.dtype != query.dtype:
        return f"keys are {key.dtype}, values {value.dtype}, queries {query.dtype}"
    if kv is not None:
        if kv.key_cache.dtype not in (query.dtype, FP8_DTYPE):
            return f"the cache holds {kv.key_cache.dtype}, queries are {query.dtype}"
        reason = why_not_cache(kv.key_cache, kv.value_cache)
    return reason or why_not_tiles("query", query) or why_not_tiles("key", key) or why_not_tiles("value", value)


def why_general_layer(device: torch.device, dtype: torch.dtype, spec: AttentionSpec) -> str | None:
    """The part of `why_general` that a layer's options decide."""
    if device.type != "cuda" or _capability(device) != HOPPER:
        return "the Hopper kernel needs compute capability 9.0"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the Hopper kernel multiplies 16-bit elements, not {dtype}"
    if spec.head_size not in (64, 80, 96, 128, 256):
        return f"the Hopper kernel has heads of 64, 80, 96, 128 and 256, not {spec.head_size}"
    if spec.blocksparse is not None:
        return "the Hopper kernel has no block-sparse patterns"
    if spec.scale <= 0:
        return f"the Hopper kernel needs a positive scale, not {spec.scale}"
    return why_no_gluon()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _hopper_over_fp8(new: Prefill, kv: PagedKV, spec: AttentionSpec) -> torch.Tensor | None:
    """Attends over the prefixes in `kv`, unpacked to 16 bits; None where the general kernel is faster, or memory is
    short."""
    query, rows = new.q, new.rows
    kind = (query.device, query.dtype, spec.num_heads, spec.num_kv_heads, spec.head_size, kv.block_size,
            spec.reach.kind, spec.logits_soft_cap is None, spec.alibi_slopes is None, spec.sinks is None)  # fmt: skip
    name = "unpacked_prefixes", query.dtype, spec.num_heads, *kv.key_cache.shape[1:]
    is_first = kind not in _warm
    if is_first:  # lengths decide between the two kernels: neither may compile later
        _warm.add(kind)
        _general(new, spec)
    if name not in rows.scratch:
        rows.scratch[name] = _unpacked_prefixes(kv, rows, spec, query.dtype, is_first)
    prefixes = rows.scratch[name]
    if prefixes is None:
        return None
    scales = scale_tensor(kv.k_scale, query.device), scale_tensor(kv.v_scale, query.device)
    prefixes.fill(kv.key_cache, kv.value_cache, rows.block_tables, *scales)
    keys, values = prefixes.pool[:, :, 0], prefixes.pool[:, :, 1]
    return _launch_hopper(new, keys, values, prefixes.block_tables, spec)


def _unpacked_prefixes(
    kv: PagedKV, rows: RowBatch, spec: AttentionSpec, dtype: torch.dtype, is_first: bool
) -> UnpackedPrefixes | None:
    from tandem.kernels.triton_kernels.prefill.unpack_prefix import UnpackedPrefixes, is_unpacking_worthwhile

    lengths = rows.query_lens_cpu, rows.seq_lens_cpu
    if not is_first and not is_unpacking_worthwhile(*lengths, spec.num_heads, spec.num_kv_heads, spec.head_size):
        return None
    try:
        return UnpackedPrefixes.allocate(*lengths, kv.key_cache, dtype)
    except torch.OutOfMemoryError:
        return None


def _launch_hopper(
    new: Prefill,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    block_tables: torch.Tensor,
    spec: AttentionSpec,
    causal: bool = True,
) -> torch.Tensor:
    """`new` over these caches and tables instead of its own, which may be in another form."""
    from tandem.kernels.triton_kernels.prefill.prefill_launch import launch_prefill, list_work

    rows, device = new.rows, new.q.device
    work = rows.scratch.get("prefill_work")
    if work is None:
        work = torch.from_numpy(list_work(rows.query_lens_cpu, rows.seq_lens_cpu)).to(device, non_blocking=True)
        rows.scratch["prefill_work"] = work
    return launch_prefill(
        new.q, new.k, new.v, key_cache, value_cache, block_tables, work, spec.scale,
        alibi_slopes=spec.slopes_on(device), sinks=spec.sinks_on(device), reach=spec.reach,
        soft_cap=spec.logits_soft_cap, causal=causal,
    )  # fmt: skip


def _general(new: Prefill, spec: AttentionSpec, causal: bool = True) -> torch.Tensor:
    from tandem.kernels.triton_kernels.prefill.paged_prefill import paged_prefill

    query, key, value, kv, rows = new
    device = query.device
    return paged_prefill(
        query, key, value, kv.key_cache if kv else None, kv.value_cache if kv else None,
        rows.block_tables, rows.query_start_loc, rows.seq_lens, rows.max_query_len, spec.scale,
        k_scale=scale_tensor(kv.k_scale if kv else 1.0, device),
        v_scale=scale_tensor(kv.v_scale if kv else 1.0, device),
        alibi_slopes=spec.slopes_on(device), sinks=spec.sinks_on(device), reach=spec.reach,
        soft_cap=spec.logits_soft_cap, sparse=spec.blocksparse, causal=causal,
    )  # fmt: skip
