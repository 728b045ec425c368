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
COPIES = KVLayout((KVGroup(1, 1, 8, "float32", num_all_kv_heads=1),), 4, tp_size=2)
WHOLE = KVLayout((KVGroup(1, 1, 8, "float32", num_all_kv_heads=1),), 4)


def made(caching: bool = True, layout: KVLayout = WHOLE, **cache) -> object | None:
    options = NodeOptions("unified", ModelOptions("m"), CacheOptions(block_size=4, hash_block_size=4, **cache))
    pool = BlockPool(4, enable_caching=caching)
    return make_tiers(options, pool, NodePool(POOL, POOL, layout, None), None, Rate(), lambda done: None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", [{"host_tier_bytes": 1 << 20}, {"disk_tier_bytes": 1 << 20, "disk_tier_dir": "/tmp"}])
def test_tiers_of_ranks_that_hold_copies_of_heads_are_refused(asked: dict) -> None:
    with pytest.raises(ConfigError, match="copies of the model's 1 KV heads"):
        made(layout=COPIES, **asked)


def test_ranks_that_hold_copies_of_heads_say_that_they_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert made(layout=COPIES) is None
    assert "no host tier" in caplog.text


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
    ({"disk_tier_bytes": 1 << 20}, "disk-tier-dir"),
    ({"disk_tier_bytes": 1 << 20, "disk_tier_dir": "/tmp", "host_tier_bytes": 0}, "raise --host-tier-bytes"),
])  # fmt: skip
def test_a_disk_that_blocks_cannot_reach_is_refused(asked: dict, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        made(**asked)
