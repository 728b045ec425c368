"""Hand-offs between pools of unlike layouts, over each transport: every token lands in its place, digests agree."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.kernels.blocks.quantization import as_bytes, overflow_counts
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.layouts.reshape import STAGED_BYTES
from tests.fakes.kv_pools import make_layout, needs
from tests.fakes.reshaped_handoff import (
    FP8,
    NUM_TOKENS,
    SOURCE_BLOCKS,
    UNLIKE_NUMBERS,
    Handoff,
    kept_as,
    layout_id,
)

ALL = ["local", "shm", "tcp", pytest.param("nixl", marks=needs("nixl"))]
SIZES = [(4, 8), (8, 4), (12, 8), (8, 12), (4, 32)]


@pytest.fixture
def make() -> Iterator:
    made: list[Handoff] = []

    def one(*arguments, **options) -> Handoff:
        made.append(Handoff(*arguments, **options))
        return made[-1]

    yield one
    for each in made:
        each.close()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("transport", ALL)
def test_blocks_of_another_size_arrive_whole_and_alone(make, transport, sizes):
    handoff = make(transport, make_layout(block_size=sizes[0]), make_layout(block_size=sizes[1], padding=64))
    handoff.push()
    assert handoff.check() == ()
    assert torch.equal(handoff.sink.node.pool, handoff.expected())
    num_bytes = NUM_TOKENS * make_layout(block_size=1).payload_bytes
    assert handoff.source.transfer.counters["kv_pushed_bytes"] == num_bytes


@pytest.mark.parametrize(("ours", "theirs"), UNLIKE_NUMBERS, ids=layout_id)
@pytest.mark.parametrize("transport", ALL)
def test_numbers_arrive_as_the_sink_would_have_stored_them(make, transport, ours, theirs):
    handoff = make(transport, ours, theirs)
    handoff.push()
    assert handoff.check() == ()
    assert torch.equal(as_bytes(handoff.sink.node.pool), as_bytes(handoff.expected()))
    num_bytes = NUM_TOKENS * kept_as(theirs.group.dtype, 1).payload_bytes
    assert handoff.source.transfer.counters["kv_pushed_bytes"] == num_bytes


def test_what_does_not_fit_into_fp8_saturates_and_is_counted(make):
    before = sum(overflow_counts().values())
    handoff = make("shm", kept_as("float32"), kept_as(FP8, 8, ((1e-4,) * 3, (1.0,) * 3)))
    handoff.push()
    assert handoff.check() == ()
    meant = handoff.source.node.pool[list(SOURCE_BLOCKS[: handoff.num_blocks]), :, :, 0] / 1e-4
    meant[-1, :, :, NUM_TOKENS % 8 :] = 0
    assert (meant.abs() > 448).any()
    assert sum(overflow_counts().values()) - before == (meant.abs() > 448).sum()


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_a_corrupt_block_is_named_by_its_place_at_the_sink(make, transport):
    handoff = make(transport, make_layout(block_size=8), make_layout(block_size=12), "corrupt:2")
    for block in range(handoff.num_blocks):
        handoff.push_whole(range(block, block + 1))
    assert handoff.check() == (1,)
    handoff.push_whole(range(1, 2))
    assert handoff.check(round=1) == ()
    assert torch.equal(handoff.sink.node.pool, handoff.expected())


def test_more_blocks_than_are_staged_at_a_time(make, monkeypatch):
    monkeypatch.setitem(STAGED_BYTES, "cpu", 3 * make_layout(block_size=4).payload_bytes)
    handoff = make("shm", make_layout(block_size=8), make_layout(block_size=4))
    handoff.push()
    assert handoff.check() == ()
    assert torch.equal(handoff.sink.node.pool, handoff.expected())


def test_a_sink_block_is_not_staged_of_too_many_source_blocks():
    sizes = BlockSizes(8, 4)
    with pytest.raises(AssertionError, match="more source blocks"):
        sizes.parts([1, 2, 3], [4, 0], [4, 4])
