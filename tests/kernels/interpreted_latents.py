"""Latents under Triton's interpreter against the float64 reference: sizes, lengths that change, a mixed step.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from latent_cases import Case, expected_rows, finished, made_case

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import PagedKV
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.triton import TritonBackend, TritonOps
from tandem.kernels.latents.new_rows import NewLatents, store_and_rotate
from tandem.kernels.reference import latents as twins
from tandem.kernels.reference import paged
from tandem.kernels.triton_kernels.decode import latent_decode
from tandem.kernels.triton_kernels.latents.absorb import store_and_absorb_triton, values_triton


def case_of(
    lengths: tuple[int, ...], heads: int, latent: int, rotated: int, block: int, dtype: torch.dtype = torch.float32
) -> Case:
    """Decode rows; slots past their ends hold NaN."""
    return made_case((1,) * len(lengths), lengths, heads, latent, rotated, block, dtype, unused=float("nan"))


NEW = [(4, 32, 16, 16, 12, True), (3, 24, 12, 20, 40, False), (40, 80, 8, 8, 16, True)]


def new_case(heads: int, latent: int, rotated: int, key: int, value: int, is_by_pairs: bool, rows: int = 6) -> Case:
    case = made_case(
        (1,) * rows, range(3, 3 + rows), heads, latent, rotated, 16, key_width=key, value_width=value, unused=7.0,
        interleaved=is_by_pairs,
    )  # fmt: skip
    case.metadata.slot_mapping[1] = -1  # a row that pads
    return case


def stored(case: Case) -> torch.Tensor:
    """The cache, once the case's rows are in it."""
    cache, slots = case.cache.clone()[:, 0, 0], case.metadata.slot_mapping
    for row, slot in zip(case.row_TR, slots.tolist(), strict=True):
        if slot >= 0:
            cache[slot // 16, slot % 16] = row
    return cache


def expected(query: torch.Tensor, kv: PagedKV, tables: torch.Tensor, lengths: list[int], spec: AttentionSpec) -> object:
    wide, first = (query.double(), kv.key_cache.double(), kv.value_cache.double()), int(spec.hides_first)
    return paged.paged_decode(*wide, tables.tolist(), lengths, spec.scale, first_seen=first)[..., : spec.latent_size]


@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "block", "lengths"),
    [(4, 32, 16, 16, (50, 1, 16)), (18, 24, 8, 48, (60, 20)), (96, 16, 8, 64, (65,))],
)
def test_sizes(heads: int, latent: int, rotated: int, block: int, lengths: tuple[int, ...]) -> None:
    query, kv, rows, spec = case_of(lengths, heads, latent, rotated, block).decode()
    output = TritonOps.decode(query, kv, rows, spec)
    wanted = expected(query, kv, rows.block_tables, list(lengths), spec)
    torch.testing.assert_close(output.double(), wanted, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("block", [16, 48])
def test_first_tokens_that_are_hidden(block: int) -> None:
    query, kv, rows, spec = case_of((70, 1, 2, 17), 8, 32, 16, block).decode()
    kv.key_cache[rows.block_tables[:, 0].long(), :, 0] = float("nan")  # it isn't loaded, either
    spec = replace(spec, hides_first=True)
    output = TritonOps.decode(query, kv, rows, spec)
    kv.key_cache.nan_to_num_()
    wanted = expected(query, kv, rows.block_tables, [70, 1, 2, 17], spec)
    assert not output[1].any(), "who sees nothing gets zeros"
    torch.testing.assert_close(output[[0, 2, 3]].double(), wanted[[0, 2, 3]], rtol=3e-6, atol=3e-6)  # type: ignore[index]


@pytest.mark.parametrize("sizes", NEW)
def test_rows_are_stored_where_nobody_attends(sizes: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NewLatents, "is_fused", True)
    case, (heads, latent, rotated, *_) = new_case(*sizes), sizes
    expected_cache = stored(case)
    layer = Attention(heads, latent + rotated, case.scale, 1, latent_size=latent, layer_name="l", attn_backend="triton")
    case.run_store(layer)
    torch.testing.assert_close(case.cache[:, 0, 0], expected_cache, rtol=1e-5, atol=1e-5)


def test_sixteen_bits() -> None:
    query, kv, rows, spec = case_of((70, 40), 8, 32, 16, 16, torch.bfloat16).decode()
    output = TritonOps.decode(query, kv, rows, spec)
    assert output.dtype == torch.bfloat16
    wanted = expected(query, kv, rows.block_tables, [70, 40], spec)
    torch.testing.assert_close(output.double(), wanted, rtol=2e-2, atol=2e-2)


def test_a_plan_follows_lengths_that_change() -> None:
    """As a captured graph does: the same launches, other lengths; a row that has become empty gives zeros."""
    query, kv, rows, spec = case_of((130, 40, 5), 4, 32, 16, 16).decode()
    constants = latent_decode.latent_constants(query.dtype, 4, 32, 16, 16)
    plan = latent_decode.plan_latents(rows.seq_lens, constants)
    for lengths in ([17, 40, 0], [129, 1, 5]):
        rows.seq_lens.copy_(torch.tensor(lengths))
        plan.fill(rows.seq_lens, constants["GROUPS"], constants["TILE"])
        output = latent_decode.latent_decode(
            query, kv.key_cache, rows.block_tables, rows.seq_lens, spec.scale, constants, plan
        )
        wanted = expected(query, kv, rows.block_tables, lengths, spec)
        torch.testing.assert_close(output.double(), wanted, rtol=3e-6, atol=3e-6)


def test_a_mixed_step_writes_decodes_and_computes_prompts() -> None:
    case = made_case((1, 1, 9, 20), (30, 1, 25, 20), 4, 16, 16, 16)
    layer = Attention(4, 32, case.scale, 1, latent_size=16, layer_name="l", attn_backend="triton")
    output = case.run(layer)
    torch.testing.assert_close(output.double(), expected_rows(case), rtol=1e-5, atol=1e-5)


def test_wide_heads_are_served_as_latents_alone() -> None:
    device, spec = torch.device("cpu"), AttentionSpec(16, 576, 0.2, 1, latent_size=512)
    assert TritonBackend.unsupported_reason(device, torch.bfloat16, 576, spec) is None
    assert TritonBackend.unsupported_reason(device, torch.bfloat16, 576, AttentionSpec(16, 576, 0.2, 1)) is not None


@pytest.mark.parametrize("sizes", NEW)
def test_rows_are_stored_and_queries_absorbed(sizes: tuple) -> None:
    case, (heads, latent, _, key, *_) = new_case(*sizes), sizes
    key_HNL = case.weight_OL.view(heads, -1, latent)[:, :key]
    new, expected_cache = case.new, stored(case)
    query = store_and_absorb_triton(
        new.query_THD, new.row_TR, key_HNL, new.gain_L, new.eps, new.position_T, new.cos_sin_CP, case.cache[:, 0, 0],
        case.metadata.slot_mapping, new.interleaved,
    )  # fmt: skip
    torch.testing.assert_close(query, twins.absorbed(case.query_THD, key_HNL), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.cache[:, 0, 0], expected_cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", NEW)
def test_prompts_rows_are_stored_and_queries_rotated(sizes: tuple) -> None:
    case = new_case(*sizes)
    expected_cache, (query, row) = stored(case), finished(case.new)
    made = store_and_rotate(case.new, case.cache[:, 0, 0], case.metadata.slot_mapping)
    torch.testing.assert_close(made, (query, row), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.cache[:, 0, 0], expected_cache, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 18])
@pytest.mark.parametrize(("latent", "value"), [(32, 12), (200, 40)])
def test_values(latent: int, value: int, rows: int) -> None:
    summed, weight = torch.randn(rows, 2, latent + 8)[..., :latent], torch.randn(2, 4 + value, latent)[:, 4:]
    out = torch.empty(rows, 2, value)
    values_triton(summed, weight, out)
    torch.testing.assert_close(out, twins.values(summed, weight), rtol=1e-5, atol=1e-4)


def test_many_rows_are_absorbed() -> None:
    case = new_case(2, 40, 8, 16, 12, True, rows=18)
    new, key_HNL = case.new, case.weight_OL.view(2, -1, 40)[:, :16]
    query = store_and_absorb_triton(
        new.query_THD, new.row_TR, key_HNL, new.gain_L, new.eps, new.position_T, new.cos_sin_CP, case.cache[:, 0, 0],
        case.metadata.slot_mapping, True,
    )  # fmt: skip
    torch.testing.assert_close(query, twins.absorbed(case.query_THD, key_HNL), rtol=1e-5, atol=1e-5)


def test_a_step_by_the_new_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: decode rows beside prompts, of which one has earlier tokens."""
    monkeypatch.setattr(NewLatents, "is_fused", True)
    case = made_case((1, 1, 9, 20), (30, 1, 25, 20), 4, 16, 16, 16)
    layer = Attention(4, 32, case.scale, 1, latent_size=16, layer_name="l", attn_backend="triton")
    torch.testing.assert_close(case.run(layer).double(), expected_rows(case), rtol=1e-5, atol=1e-5)
