"""PagedAttention's static operations, with all the arguments of the public signatures, on plain tensors."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.paged_attention import PagedAttention, calculate_cache_memory_usage
from tandem.kernels.backends.partitions import choose_paged_attention_version, num_partitions
from tandem.kernels.check.sample_batches import random_batch
from tandem.kernels.reference import paged


def test_decode_with_every_argument() -> None:
    batch = random_batch((1, 1, 1), (33, 1, 16), dtype=torch.float64)
    caches = batch.kv().key_cache, batch.kv().value_cache
    PagedAttention.write_to_paged_cache(batch.key, batch.value, *caches, batch.metadata.slot_mapping, "float64")
    slopes = paged.alibi_slopes(4)
    output = PagedAttention.forward_decode(
        batch.query, *caches, batch.metadata.block_tables, batch.metadata.seq_lens, 33, "auto", 2, 0.3,
        torch.tensor(slopes), torch.tensor(1.0), torch.tensor(1.0), 1, 1, 3, 4, 0,
        sliding_window=20, logits_soft_cap=2.0,
    )  # fmt: skip
    sparse = {"local_blocks": 1, "vert_stride": 3, "block_size": 4, "head_sliding_step": 0, "tp_rank": 1}
    expected = paged.paged_decode(
        batch.query, *caches, batch.block_tables, (33, 1, 16), 0.3,
        slopes=slopes, window=20, soft_cap=2.0, sparse=sparse,
    )  # fmt: skip
    torch.testing.assert_close(output, expected, rtol=1e-7, atol=1e-7)


def test_prefix_stores_and_attends() -> None:
    batch = random_batch((3, 16), (40, 33), dtype=torch.float64)
    caches = batch.kv().key_cache, batch.kv().value_cache
    meta = batch.metadata
    output = PagedAttention.forward_prefix(
        batch.query, batch.key, batch.value, "auto", *caches, meta.block_tables, meta.query_start_loc,
        meta.seq_lens, 16, sliding_window=9, scale=0.3,
    )  # fmt: skip
    expected = paged.paged_prefill(
        batch.query, batch.key, batch.value, *caches, batch.block_tables, (3, 16), (40, 33), 0.3, window=9
    )
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)
    stored = paged.read_sequence(caches[0], batch.block_tables[1], 33)
    assert torch.equal(stored[-16:], batch.key[3:])


def test_one_prompt_in_batch_form_with_open_query_start_loc() -> None:
    """query [1, seq, hidden], query_start_loc without its end, the default scale."""
    batch = random_batch((20,), (20,), dtype=torch.float64)
    caches = batch.kv().key_cache, batch.kv().value_cache
    output = PagedAttention.forward_prefix(
        batch.query.view(1, 20, 64), batch.key.view(1, 20, 32), batch.value.view(1, 20, 32), "float64", *caches,
        batch.metadata.block_tables, torch.tensor([0]), torch.tensor([20]), 20,
    )  # fmt: skip
    expected = paged.paged_prefill(batch.query, batch.key, batch.value, *caches, batch.block_tables, (20,), (20,), 0.25)
    assert output.shape == (1, 20, 64)
    torch.testing.assert_close(output.view(20, 4, 16), expected, rtol=1e-9, atol=1e-9)


def test_decode_continues_what_prefix_stored_step_by_step() -> None:
    batch = random_batch((10,), (10,), dtype=torch.float64)
    caches = batch.kv().key_cache, batch.kv().value_cache
    tables, whole = batch.metadata.block_tables, torch.tensor([0, 6])
    out = PagedAttention.forward_prefix(
        batch.query[:6], batch.key[:6], batch.value[:6], "auto", *caches, tables, whole, torch.tensor([6]), 6
    )
    for step in range(6, 10):
        new = slice(step, step + 1)
        slot = torch.tensor([[batch.block_tables[0][0] * 16 + step]])
        PagedAttention.write_to_paged_cache(batch.key[new], batch.value[new], *caches, slot, "auto")
        row = PagedAttention.forward_decode(
            batch.query[new], *caches, tables, torch.tensor([step + 1]), step + 1, "auto", 2, 0.25
        )
        out = torch.cat((out, row))
    expected = paged.paged_prefill(batch.query, batch.key, batch.value, *caches, batch.block_tables, (10,), (10,), 0.25)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_fp8_by_name_only_on_an_fp8_cache() -> None:
    batch = random_batch((1,), (5,))
    caches = batch.kv().key_cache, batch.kv().value_cache
    with pytest.raises(UnsupportedOptionError, match="kv_cache_dtype"):
        PagedAttention.write_to_paged_cache(batch.key, batch.value, *caches, batch.metadata.slot_mapping, "fp8")
    with pytest.raises(UnsupportedOptionError, match="kv_cache_dtype"):
        PagedAttention.write_to_paged_cache(batch.key, batch.value, *caches, batch.metadata.slot_mapping, "float16")


@pytest.mark.parametrize(
    ("max_seq_len", "batch", "version"),
    [
        (2048, 8, "V2"),
        (2048, 64, "V2"),
        (64, 1, "V1"),
        (512, 1, "V2"),
        (1024, 64, "V1"),
        (1024, 63, "V2"),
        (256, 256, "V1"),
    ],
)
def test_version_choice(max_seq_len: int, batch: int, version: str) -> None:
    assert choose_paged_attention_version(max_seq_len, batch, 32, num_partitions(max_seq_len)) == version


def test_cache_shapes() -> None:
    shape = PagedAttention.get_kv_cache_shape(10, 64, 2, 32)
    assert shape == (10, 2, 2, 64, 32)
    key, value = PagedAttention.split_kv_cache(torch.arange(10 * 2 * 2 * 64 * 32.0).view(shape), 2, 32)
    assert key.shape == value.shape == (10, 2, 64, 32)
    assert float(value[0, 0, 0, 0] - key[0, 0, 0, 0]) == 64 * 32
    flat_key, _ = PagedAttention.split_kv_cache(torch.zeros(2, 10, 64 * 2 * 32), 2, 32)
    assert flat_key.shape == (10, 2, 64, 32)
    with pytest.raises(ValueError, match="no KV cache"):
        PagedAttention.split_kv_cache(torch.zeros(10, 3, 2, 64, 32), 2, 32)
    assert calculate_cache_memory_usage(1000, 16, 32, 128) == 2 * 1000 * 16 * 32 * 128 * 2


def test_lengths_that_contradict_each_other_are_refused() -> None:
    batch = random_batch((3,), (9,))
    caches, tables = (batch.kv().key_cache, batch.kv().value_cache), batch.metadata.block_tables
    with pytest.raises(ValueError, match="max_seq_len"):
        PagedAttention.forward_decode(batch.query[:1], *caches, tables, torch.tensor([9]), 8, "auto", 2, 0.3)
    prompt = (batch.query, batch.key, batch.value, "auto", *caches, tables)
    with pytest.raises(ValueError, match="max_query_len"):
        PagedAttention.forward_prefix(*prompt, torch.tensor([0, 3]), torch.tensor([9]), 2)
    with pytest.raises(ValueError, match="query_start_loc"):
        PagedAttention.forward_prefix(*prompt, torch.tensor([0, 3]), torch.tensor([2]), 3)
