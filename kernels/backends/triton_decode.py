"""Decode with our Triton kernels: which version, and what the layers of a step share.

A RowBatch's scratch keeps the plan of its lengths, so that a step plans once for all its layers: inside a captured
graph the plan is part of the graph and follows the lengths of each replay.

Rows that share prefixes take two launches that overlap: the prefixes, each read once, and the rows' own tokens.
"""

from __future__ import annotations

import torch

from tandem.kernels.api.backend import PagedKV
from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.partitions import choose_paged_attention_version, num_partitions
from tandem.kernels.blocks.quantization import scale_tensor
from tandem.kernels.products.matmul_device import shared_bytes_of
from tandem.kernels.triton_kernels.decode.block_sparse import list_sparse_tiles
from tandem.kernels.triton_kernels.decode.decode_launch import (
    MAX_NEW_TOKENS,
    PrefixParts,
    SparseTiles,
    decode_constants,
    paged_decode,
    plan_decode,
)
from tandem.kernels.triton_kernels.decode.decode_plan import DecodePlan
from tandem.kernels.triton_kernels.decode.latent_decode import (
    latent_constants,
    latent_decode,
    plan_latents,
)
from tandem.kernels.triton_kernels.decode.shared_prefix import (
    attend_prefixes,
    could_share,
    plan_prefixes,
    prefix_constants,
)

_compiled: set[tuple[object, ...]] = set()


def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
    """query [T, H, D], up to MAX_NEW_TOKENS new tokens a row whose KV is stored -> [T, H, D].

    Raises UnsupportedOptionError for more, and for what the kernels can't do.
    """
    if spec.latent_size is not None:
        return _decode_latents(query, kv, rows, spec, spec.latent_size)
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
    scales = scale_tensor(kv.k_scale, device), scale_tensor(kv.v_scale, device)
    slopes = spec.slopes_on(device)

    def run(version: str) -> torch.Tensor:
        shares = version == "shared"
        plan = None if version == "V1" else _plan(rows, spec, constants, sparse, shares)
        prefix = _attend_prefixes(query, kv, rows, spec, constants, scales[0]) if shares else None
        return paged_decode(
            query, kv.key_cache, kv.value_cache, rows.block_tables, rows.seq_lens, spec.scale, constants,
            plan=plan, k_scale=scales[0], v_scale=scales[1], query_starts=rows.query_start_loc if num_new > 1 else None,
            alibi_slopes=slopes, sinks=spec.sinks_on(device), reach=spec.reach, soft_cap=spec.logits_soft_cap,
            sparse=None if sparse is None or spec.blocksparse is None else (spec.blocksparse, sparse), prefix=prefix,
        )  # fmt: skip

    version = version_of(constants, rows.max_seq_len, rows.num_rows, spec.num_heads)
    if rows.shared_prefixes is not None and num_new == 1 and _may_share(spec, constants, query.dtype):
        version = "shared"
    kind = (id(constants), device, spec.num_kv_heads, spec.blocksparse, spec.reach.kind, spec.logits_soft_cap is None,
            spec.alibi_slopes is None, spec.sinks is None, version == "shared")  # fmt: skip
    if kind not in _compiled:
        _compiled.add(kind)
        for other in ({"V2"} if constants["num_warps"] == 1 else {"V1", "V2"}) - {version}:
            run(other)  # lengths decide between them: neither may compile later
    return run(version)


def _decode_latents(
    query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec, latent_size: int
) -> torch.Tensor:
    """Attends over latents -> [N, H, latent_size]."""
    constants = latent_constants(
        query.dtype, spec.num_heads, latent_size, spec.head_size - latent_size, kv.block_size,
        shared_bytes_of(query.device),
    )  # fmt: skip
    key = ("latent_plan", id(constants))
    if key not in rows.scratch:
        rows.scratch[key] = plan_latents(rows.seq_lens, constants)
    return latent_decode(
        query, kv.key_cache, rows.block_tables, rows.seq_lens, spec.scale, constants, rows.scratch[key],
        first=int(spec.hides_first),
    )  # fmt: skip


def version_of(constants: dict[str, int], max_seq_len: int, num_rows: int, num_heads: int) -> str:
    """Which version serves such rows: V1 or V2. Layers of 16 bits with up to 16 query heads a KV head have programs of
    one warp, for which a whole segment is too much: they are V2's, whatever the lengths."""
    if constants["num_warps"] == 1:
        return "V2"
    return choose_paged_attention_version(max_seq_len, num_rows, num_heads, num_partitions(max_seq_len))


def _may_share(spec: AttentionSpec, constants: dict[str, int], dtype: torch.dtype) -> bool:
    return spec.sees_every_token and could_share(constants, dtype.itemsize)


def _attend_prefixes(
    query: torch.Tensor,
    kv: PagedKV,
    rows: RowBatch,
    spec: AttentionSpec,
    constants: dict[str, int],
    k_scale: torch.Tensor,
) -> PrefixParts:
    """The rows' parts over what they share; layers of a step share the plan."""
    prefixes = rows.shared_prefixes
    assert prefixes is not None
    constants = prefix_constants(constants, prefixes.members)
    key = ("prefix_plan", spec.num_kv_heads, *constants.values())
    if key not in rows.scratch:
        rows.scratch[key] = plan_prefixes(prefixes, spec.num_kv_heads, constants)
    return attend_prefixes(
        query, kv.key_cache, kv.value_cache, rows.block_tables, rows.seq_lens, prefixes, rows.scratch[key],
        spec.scale, constants, k_scale=k_scale, alibi_slopes=spec.slopes_on(query.device),
        soft_cap=spec.logits_soft_cap,
    )  # fmt: skip


def _plan(
    rows: RowBatch,
    spec: AttentionSpec,
    constants: dict[str, int],
    sparse: SparseTiles | None,
    shares: bool,
) -> DecodePlan:
    key = ("decode_plan", id(constants), spec.num_kv_heads, spec.reach, spec.blocksparse, shares)
    plan: DecodePlan | None = rows.scratch.get(key)
    if plan is None:
        plan = plan_decode(
            rows.seq_lens, spec.num_kv_heads, constants, reach=spec.reach, sparse=sparse,
            prefix_lens=rows.shared_prefixes.row_lens if shares and rows.shared_prefixes else None,
        )  # fmt: skip
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
