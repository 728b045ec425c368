"""Real nodes with a disk tier: what one process leaves there serves the next, if it is whole and of the same model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tier_nodes import NUM_BLOCKS, NUM_HITS, Asker, References, always_loading, make_references
from waiting import PATIENCE_S, wait_until

from in_process_cluster import BLOCK, Node, node_options
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import random_prompt, tiny_model

BLOCK_BYTES = 12288
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def references() -> dict[str, References]:
    return {model: make_references(model) for model in ("llama", "qwen3")}


@contextmanager
def node_on(folder: Path, model: str = "llama", **changes: object) -> Iterator[Asker]:
    tiers = {"disk_tier_bytes": 4 * MEGABYTE, "disk_tier_dir": str(folder), **changes}
    node = always_loading(Node(node_options("unified", tiny_model(model), num_blocks=NUM_BLOCKS, **tiers)))
    asker = Asker(node)
    try:
        yield asker
        node.wait_until_whole()
    finally:
        asker.client.close()
        node.stop()
    node.process.tiers.manager.check_integrity()


def until_on_disk(asker: Asker) -> None:
    (node,) = asker.nodes
    manager = node.process.tiers.manager

    def is_written() -> bool:
        cached = node.cached_hashes()
        return bool(cached) and all(map(manager.is_on_disk, cached))

    wait_until(is_written, "an idle node to write to disk")


def until_idle(node: Node) -> None:
    """Until nothing has gone down for a while."""
    write_back, quiet, deadline = node.process.tiers.manager._write_back, 0, time.monotonic() + PATIENCE_S
    while quiet < 10:
        assert time.monotonic() < deadline, "blocks go down for ever"
        time.sleep(0.02)
        quiet = 0 if write_back._saving or write_back._spilling else quiet + 1


def fill(folder: Path, wanted: References, model: str = "llama") -> None:
    with node_on(folder, model) as asker:
        for each in wanted:
            asker.ask(each)
            until_on_disk(asker)


def test_a_new_process_finds_what_the_last_one_left(tmp_path: Path, references: dict[str, References]) -> None:
    fill(tmp_path, references["llama"])
    with node_on(tmp_path) as asker:
        for each in references["llama"]:
            asker.ask(each)
        counts = asker.counts(asker.nodes[0])
        assert counts["tier_disk_hits"] == NUM_HITS
        assert counts["tier_host_hits"] == NUM_HITS
        assert counts["tier_loads_failed"] == 0


# README says: "and disk (`--disk-tier-bytes`"
def test_what_host_memory_has_no_room_for_is_on_disk(tmp_path: Path, references: dict[str, References]) -> None:
    with node_on(tmp_path, host_tier_bytes=30 * BLOCK_BYTES) as asker:
        for _ in range(3):
            for each in references["llama"]:
                asker.ask(each)
                until_on_disk(asker)
        counts = asker.counts(asker.nodes[0])
        assert counts["tier_host_evictions"] > 0
        assert counts["tier_disk_hits"] >= 17
        assert counts["tier_host_blocks"] <= 30


def test_damaged_blocks_are_computed_again(tmp_path: Path, references: dict[str, References]) -> None:
    fill(tmp_path, references["llama"])
    (data,) = tmp_path.glob("*.kv")
    content = np.memmap(data, np.uint8, "r+")
    content[100 :: 2 * BLOCK_BYTES] ^= 1  # one bit of every second block
    content.flush()
    with node_on(tmp_path) as asker:
        for _ in range(2):
            for each in references["llama"]:
                asker.ask(each)
        counts = asker.counts(asker.nodes[0])
        assert counts["tier_loads_failed"] >= 1
        assert counts["tier_disk_hits"] < NUM_HITS
        assert counts["tier_disk_dropped"] >= 3


@pytest.mark.parametrize("damage", ["garbage", "cut", "gone"])
def test_a_damaged_index_finds_nothing_wrong(tmp_path: Path, references: dict[str, References], damage: str) -> None:
    fill(tmp_path, references["llama"][:1])
    (index,) = tmp_path.glob("*.index")
    if damage == "gone":
        index.unlink()
    elif damage == "cut":
        index.write_bytes(index.read_bytes()[:4500])
    else:
        records = np.frombuffer(index.read_bytes()[4096:], np.uint8)
        index.write_bytes(index.read_bytes()[:4096] + np.roll(records, 7).tobytes())
    with node_on(tmp_path) as asker:
        asker.ask(references["llama"][0])
        assert asker.counts(asker.nodes[0])["tier_loads_failed"] == 0


def test_another_models_files_are_overwritten(tmp_path: Path, references: dict[str, References]) -> None:
    fill(tmp_path, references["llama"])
    fill(tmp_path, references["qwen3"], "qwen3")
    assert len(list(tmp_path.glob("*.kv"))) == 1
    with node_on(tmp_path, "qwen3") as asker:
        asker.ask(references["qwen3"][0])
        assert asker.counts(asker.nodes[0])["tier_disk_hits"] == 17


def test_two_nodes_share_a_folder_not_a_file(tmp_path: Path, references: dict[str, References]) -> None:
    with node_on(tmp_path) as first, node_on(tmp_path) as second:
        for asker in (first, second):
            asker.ask(references["llama"][0])
            until_on_disk(asker)
        assert len(list(tmp_path.glob("*.kv"))) == 2


def test_a_tenant_fills_no_more_than_its_share_of_each_tier(tmp_path: Path) -> None:
    """Six of 24 blocks of the pool, ten of 40 in host memory, twelve of 48 on disk, whatever it asks."""
    sizes = {"host_tier_bytes": 40 * BLOCK_BYTES, "disk_tier_bytes": 48 * (BLOCK_BYTES + 100)}
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    with node_on(tmp_path, **sizes) as asker:
        (node,) = asker.nodes

        def num_blocks() -> tuple[int, float, float]:
            counts = asker.counts(node)
            return node.process.pool.num_cached, counts["tier_host_blocks"], counts["tier_disk_blocks"]

        def check_fills(tenant: str, share: float, expected: tuple[int, int, int]) -> None:
            for seed in range(4):
                prompt, salt = random_prompt(17 * BLOCK, seed=seed), tenant.encode() * 16
                asker.client.submit(f"{tenant}{seed}", prompt, sampling, decode=node.info, salt=salt, cache_share=share)
                asker.client.wait()
                until_idle(node)
            wait_until(lambda: num_blocks() == expected, f"{tenant} to fill its share")
            until_idle(node)
            assert num_blocks() == expected

        check_fills("s", 0.25, (6, 10, 12))
        check_fills("l", 1.0, (24, 40, 48))


def test_options_that_contradict_each_other(tmp_path: Path) -> None:
    for changes in ({"disk_tier_dir": ""}, {"host_tier_bytes": 0}, {"disk_tier_bytes": 100}):
        with pytest.raises(ConfigError, match="tier"), node_on(tmp_path, **changes):
            pass
