"""Which options lead to tiers, to none, or to an error that says what to change."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.rate import Rate
from tandem.node.pool import NodePool
from tandem.node.tiers import host_tier_bytes, make_tiers

POOL = torch.zeros(4, 1, 1, 2, 4, 8)
LAYOUT = KVLayout((KVGroup(1, 1, 8, "float32"),), 4)


def made(caching: bool = True, **cache) -> object | None:
    options = NodeOptions("unified", ModelOptions("m"), CacheOptions(block_size=4, hash_block_size=4, **cache))
    pool = BlockPool(4, enable_caching=caching)
    return make_tiers(options, pool, NodePool(POOL, POOL, LAYOUT, None), None, Rate(), lambda done: None, None)  # type: ignore[arg-type]


def test_a_host_tier_is_there_unless_it_is_turned_off() -> None:
    """Within bounds that leave room for other nodes of the host."""
    default = NodeOptions("unified", ModelOptions("m"))
    assert 0 < host_tier_bytes(default, on_gpu=False) <= 256 << 20
    assert 0 < host_tier_bytes(default, on_gpu=True) <= 16 << 30
    for given in (0, 1 << 40):
        assert host_tier_bytes(replace(default, cache=CacheOptions(host_tier_bytes=given)), on_gpu=True) == given


def test_nothing_to_keep_needs_no_tier() -> None:
    assert made(caching=False) is None
    assert made(host_tier_bytes=0) is None


@pytest.mark.parametrize(("asked", "remedy"), [
    ({"disk_tier_bytes": 1 << 20}, "disk-tier-dir: say where"),
    ({"disk_tier_dir": "/tmp"}, "disk-tier-bytes: say how much"),
    ({"disk_tier_bytes": 1 << 20, "disk_tier_dir": "/tmp", "host_tier_bytes": 0}, "raise --host-tier-bytes"),
])  # fmt: skip
def test_a_disk_that_blocks_cannot_reach_is_refused(asked: dict, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        made(**asked)
