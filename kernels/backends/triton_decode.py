"""Decode with our Triton kernels: which version, and what the layers of a step share.

A RowBatch's scratch keeps the plan of its lengths, so that a step plans once for all its layers: inside a captured
graph the plan is part of the graph and follows the lengths of each replay.
"""

from __future__ import annotations

import torch

from tandem.kernels.backend import PagedKV
from tandem.kernels.errors import UnsupportedOptionError
from tandem.kernels.metadata import RowBatch
from tandem.kernels.partitions import choose_paged_attention_version, num_partitions
from tandem.kernels.quantization import scale_tensor
from tandem.kernels.spec import AttentionSpec
from tandem.kernels.triton_kernels.block_sparse import list_sparse_tiles
from tandem.kernels.triton_kernels.decode_launch import (
    MAX_NEW_TOKENS,
    SparseTiles,
    decode_constants,
    paged_decode,
    plan_decode,
)
from tandem.kernels.triton_kernels.decode_plan import DecodePlan

_compiled: set[tuple[object, ...]] = set()


def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
    """query [T, H, D], up to MAX_NEW_TOKENS new tokens a row whose KV is stored -> [T, H, D].

    Raises UnsupportedOptionError for more, and for what the kernels can't do.
    """
    num_new = max(rows.max_query_len, 1)
    if num_new > MAX_NEW_TOKENS:
        raise UnsupportedOptionError("max_query_len", f"decode takes up to {MAX_NEW_TOKENS} new tokens, not {num_new}")
    if num_new > 1 and spec.blocksparse is not None:
        raise UnsupportedOptionError("blocksparse_params", f"block-sparse decode takes one new token, not {num_new}")
    device = query.device
    constants = decode_constants(
        query.dtype, kv.key_cache.element_size(), spec.group_size, num_new, spec.head_size, kv.block_size,
        0 if spec.blocksparse is None else spec.blocksparse.block_size,
    )  # fmt: skip
    sparse = _sparse_tiles(rows, spec, constants)

    def run(version: str) -> torch.Tensor:
        return paged_decode(
            query, kv.key_cache, kv.value_cache, rows.block_tables, rows.seq_lens, spec.scale, constants,
            plan=_plan(rows, spec, constants, sparse) if version == "V2" else None,
            k_scale=scale_tensor(kv.k_scale, device), v_scale=scale_tensor(kv.v_scale, device),
            query_starts=rows.query_start_loc if num_new > 1 else None, alibi_slopes=spec.slopes_on(device),
            window=spec.sliding_window, soft_cap=spec.logits_soft_cap,
            sparse=None if sparse is None or spec.blocksparse is None else (spec.blocksparse, sparse),
        )  # fmt: skip

    version = choose_paged_attention_version(
        rows.max_seq_len, rows.num_rows, spec.num_heads, num_partitions(rows.max_seq_len)
    )
    kind = (id(constants), device, spec.num_kv_heads, spec.blocksparse, spec.sliding_window is None,
            spec.logits_soft_cap is None, spec.alibi_slopes is None)  # fmt: skip
    if kind not in _compiled:
        _compiled.add(kind)
        run("V1" if version == "V2" else "V2")  # lengths decide between them: neither may compile later
    return run(version)


def _plan(rows: RowBatch, spec: AttentionSpec, constants: dict[str, int], sparse: SparseTiles | None) -> DecodePlan:
    key = ("decode_plan", id(constants), spec.num_kv_heads, spec.sliding_window, spec.blocksparse)
    plan: DecodePlan | None = rows.scratch.get(key)
    if plan is None:
        plan = plan_decode(rows.seq_lens, spec.num_kv_heads, constants, window=spec.sliding_window, sparse=sparse)
        rows.scratch[key] = plan
    return plan


def _sparse_tiles(rows: RowBatch, spec: AttentionSpec, constants: dict[str, int]) -> SparseTiles | None:
    if spec.blocksparse is None:
        return None
    key = ("sparse_tiles", id(constants), spec.num_heads, spec.num_kv_heads, spec.blocksparse)
    tiles: SparseTiles | None = rows.scratch.get(key)
    if tiles is None:
        tiles = list_sparse_tiles(
            spec.blocksparse, rows.seq_lens, rows.max_seq_len, spec.num_heads, spec.num_kv_heads, constants["TILE"]
        )
        rows.scratch[key] = tiles
    return tiles
