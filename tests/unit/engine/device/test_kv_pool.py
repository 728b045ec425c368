"""Size, shape and home of the KV pool."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import pytest
import torch

from tandem.engine.contracts.config import CacheOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.device import kv_pool
from tandem.engine.device.kv_pool import allocate_pool, free_host_bytes, num_blocks_for, pool_bytes

LAYOUT = KVLayout(groups=(KVGroup(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32"),), block_size=8)


def test_a_block_is_one_run_with_heads_outermost():
    pool = allocate_pool(LAYOUT, 5, "cpu")
    assert pool.shape == (5, 2, 3, 2, 8, 4)
    assert pool.is_contiguous()
    assert pool.stride(0) * pool.element_size() == LAYOUT.payload_bytes == 2 * 3 * 2 * 8 * 4 * 4
    assert not pool.any()


def test_pool_in_shared_memory_is_that_memory():
    shared = mmap.mmap(-1, pool_bytes(LAYOUT, 4))
    pool = allocate_pool(LAYOUT, 4, "cpu", storage=shared)
    pool[2, 1, 0, 1, 3, 2] = 1.5
    flat = torch.frombuffer(shared, dtype=torch.float32)
    assert flat.nonzero().item() == 2 * 384 + 1 * 192 + 0 * 64 + 1 * 32 + 3 * 4 + 2
    shared[0:4] = b"\x00\x00\x80\x3f"
    assert pool.view(-1)[0] == 1.0


def test_a_buffer_that_is_too_small_is_refused():
    with pytest.raises(ConfigError, match="6144 bytes, its shared memory has 6143"):
        allocate_pool(LAYOUT, 4, "cpu", storage=bytearray(6143))


def test_stride_may_exceed_the_payload():
    layout = KVLayout(groups=LAYOUT.groups, block_size=8, block_stride_bytes=LAYOUT.payload_bytes + 64)
    storage = bytearray(pool_bytes(layout, 3))
    pool = allocate_pool(layout, 3, "cpu", storage=storage)
    pool.fill_(1.0)
    assert pool.shape == (3, 2, 3, 2, 8, 4)
    ones = torch.frombuffer(storage, dtype=torch.float32).view(3, -1)
    assert ones[:, :384].all()
    assert not ones[:, 384:].any()


@pytest.mark.parametrize(
    ("options", "free_bytes", "expected"),
    [
        (CacheOptions(num_blocks=7), 0, 7),
        (CacheOptions(kv_cache_memory_bytes=10 * 1536 + 1535), 10**9, 10),
        (CacheOptions(), 12 * 1536, 12),
    ],
)
def test_num_blocks(options, free_bytes, expected):
    assert num_blocks_for(options, LAYOUT, free_bytes) == expected


def test_a_pool_of_too_few_blocks_names_the_remedy():
    with pytest.raises(ConfigError, match=r"holds 1 KV blocks .* at least 2: use a smaller model, or give more"):
        num_blocks_for(CacheOptions(), LAYOUT, 2 * 1536 - 1)
    with pytest.raises(ConfigError, match="smaller model"):
        num_blocks_for(CacheOptions(), LAYOUT, -5)
    with pytest.raises(ConfigError, match="at least 2"):
        num_blocks_for(CacheOptions(num_blocks=1), LAYOUT, 0)


def test_host_share_is_capped():
    assert 0 < free_host_bytes() <= 4 << 30
    assert free_host_bytes(share=0.5, most=100) == 100


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert kv_pool._free_in_cgroup(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 500\nfile 200\ninactive_file 150\n")
    assert kv_pool._free_in_cgroup(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert kv_pool._free_in_cgroup(tmp_path) == math.inf
