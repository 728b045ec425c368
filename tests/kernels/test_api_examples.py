"""The attention API's three documented examples, as they are written but for the tensors' sizes, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import AttentionBackend
from tandem.kernels.api.metadata import PagedAttentionMetadata
from tandem.kernels.api.paged_attention import PagedAttention
from tandem.kernels.api.selection import load_backend

HEADS, SIZE, BLOCK = 4, 32, 16
SCALE = 1.0 / SIZE**0.5


def test_basic_attention_over_a_flat_cache() -> None:
    attention = Attention(num_heads=HEADS, head_size=SIZE, scale=SCALE, num_kv_heads=HEADS)
    batch_size, seq_len, hidden_size = 4, 64, HEADS * SIZE
    query, key, value = (torch.randn(batch_size, seq_len, hidden_size) for _ in range(3))
    kv_cache = torch.zeros(2, 100, BLOCK * HEADS * SIZE)
    lengths, blocks = [64, 50, 37, 32], torch.randperm(100)[: batch_size * 4].view(batch_size, 4)
    metadata = PagedAttentionMetadata(seq_lens_tensor=torch.tensor(lengths), block_tables=blocks)
    output = attention.forward(query, key, value, kv_cache, metadata)
    assert output.shape == (batch_size, seq_len, hidden_size)
    for row, length in enumerate(lengths):
        q, k, v = (x[row, :length].view(length, HEADS, SIZE).transpose(0, 1) for x in (query, key, value))
        expected = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(length, -1)
        torch.testing.assert_close(output[row, :length], expected, atol=1e-5, rtol=1e-4)
        assert not output[row, length:].any()
    keys, _ = PagedAttention.split_kv_cache(kv_cache, HEADS, SIZE)
    torch.testing.assert_close(keys[blocks[0, 1], :, 3], key[0, BLOCK + 3].view(HEADS, SIZE))


@pytest.mark.parametrize(
    ("shape", "tables", "named"),
    [((3, 10, 2048), (1, 2), "flat"), ((2, 10, 2047), (1, 2), "flat"), ((2, 10, 2048), (1, 1), "block_tables")],
)
def test_what_does_not_fit_is_named(shape: tuple[int, ...], tables: tuple[int, int], named: str) -> None:
    attention = Attention(num_heads=HEADS, head_size=SIZE, scale=SCALE)
    new = torch.zeros(1, 20, HEADS * SIZE)
    metadata = PagedAttentionMetadata(torch.tensor([20]), torch.zeros(tables, dtype=torch.int32))
    with pytest.raises(ValueError, match=named):
        attention.forward(new, new, new, torch.zeros(shape), metadata)


def test_prefill_then_decode() -> None:
    num_tokens, num_steps = 96, 5
    shape = PagedAttention.get_kv_cache_shape(10, BLOCK, HEADS, SIZE)
    key_cache, value_cache = PagedAttention.split_kv_cache(torch.zeros(shape, dtype=torch.float16), HEADS, SIZE)
    block_tables = torch.randperm(10)[:7].view(1, 7)
    query, key, value = (torch.randn(1, num_tokens, HEADS * SIZE, dtype=torch.float16) for _ in range(3))
    prefill_output = PagedAttention.forward_prefix(
        query=query,
        key=key,
        value=value,
        kv_cache_dtype="float16",
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        query_start_loc=torch.tensor([0]),
        seq_lens_tensor=torch.tensor([num_tokens]),
        max_query_len=num_tokens,
    )
    q, k, v = (x[0].view(num_tokens, HEADS, SIZE).transpose(0, 1).float() for x in (query, key, value))
    expected = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(1, num_tokens, -1)
    torch.testing.assert_close(prefill_output.float(), expected, atol=5e-3, rtol=5e-3)
    for step in range(num_steps):
        decode_query = torch.randn(1, HEADS, SIZE, dtype=torch.float16)
        decode_output = PagedAttention.forward_decode(
            query=decode_query,
            key_cache=key_cache,
            value_cache=value_cache,
            block_tables=block_tables,
            seq_lens=torch.tensor([num_tokens + step]),
            max_seq_len=num_tokens + step + 1,
            kv_cache_dtype="float16",
            num_kv_heads=HEADS,
            scale=SCALE,
        )
        k, v = (
            cache[block_tables[0]].transpose(0, 1).reshape(HEADS, -1, SIZE)[:, : num_tokens + step].float()
            for cache in (key_cache, value_cache)
        )
        expected = scaled_dot_product_attention(decode_query[0, :, None].float(), k, v).transpose(0, 1)
        torch.testing.assert_close(decode_output.float(), expected, atol=5e-3, rtol=5e-3)


def test_several_backends() -> None:
    def choose_attention_backend(use_paged_attention: bool) -> type[AttentionBackend]:
        return load_backend("paged_attention" if use_paged_attention else "flash_attention")

    backend = choose_attention_backend(use_paged_attention=True)
    attention = Attention(num_heads=HEADS, head_size=SIZE, scale=SCALE, attn_backend=backend)
    assert isinstance(attention.impl, backend.get_impl_cls())
    assert choose_attention_backend(use_paged_attention=False).get_name() != backend.get_name()
