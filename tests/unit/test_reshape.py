"""Hand-offs between pools of unlike layouts, over each transport: every token lands in its place, digests agree."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import pytest
import torch

from tandem.engine.kv_layout import KVLayout
from tandem.engine.messages import FirstToken
from tandem.kernels.quantization import as_bytes, overflow_counts
from tandem.kv_connector.meta import Finalize, LayerPush, ReadySent, Verified, Verify, WholePush, digest_key
from tandem.kv_connector.plan import BlockSizes
from tests.fakes.kv_pools import PoolNode, make_layout, needs
from tests.fakes.transfer_side import Side

KEY = ("r", 0)
ALL = ["local", "shm", "tcp", pytest.param("nixl", marks=needs("nixl"))]
SIZES = [(4, 8), (8, 4), (12, 8), (8, 12), (4, 32)]
NUM_TOKENS = 43
SOURCE_BLOCKS, SINK_BLOCKS = (5, 2, 9, 14, 11, 3, 8, 1, 13, 6, 15), (4, 9, 2, 12, 7, 0, 10, 3, 1, 8, 11)


class Handoff:
    """A prompt of NUM_TOKENS tokens, in SOURCE_BLOCKS, on its way into SINK_BLOCKS."""

    def __init__(self, transport: str, ours: KVLayout, theirs: KVLayout, faults: str = "") -> None:
        self.sizes = BlockSizes(ours.block_size, theirs.block_size)
        self.source = Side(PoolNode("p", transport, seed=1, layout=ours), faults)
        self.sink = Side(PoolNode("d", transport, seed=2, layout=theirs))
        self.sink.node.admit(self.source.node.info)
        self.source.transfer.connect_peer(self.sink.node.info)
        self.num_blocks = self.sizes.num_sink_blocks(NUM_TOKENS)
        self.grant = self.sink.node.grant(self.source.node.info, SINK_BLOCKS[: self.num_blocks])
        self.key = digest_key(*KEY, self.grant.grant_id)
        self.untouched = self.sink.node.pool.clone()

    def job(self, blocks: range) -> dict:
        valid = [self.sizes.num_valid(block, NUM_TOKENS) for block in blocks]
        origins = [self.sizes.origin(*each) for each in zip(blocks, valid, strict=True)]
        return {
            "key": KEY,
            "grant": self.grant,
            "source_block_ids": tuple(SOURCE_BLOCKS[block] for origin, _ in origins for block in origin),
            "first_slots": tuple(first for _, first in origins),
            "num_valid": tuple(valid),
            "destination_block_ids": self.grant.block_ids[blocks.start : blocks.stop],
        }

    def push(self) -> None:
        """The first two blocks whole, the others layer by layer."""
        self.push_whole(range(2))
        push = LayerPush(**self.job(range(2, self.num_blocks)))
        for layer in range(self.source.node.layout.group.num_layers):
            self.source.transfer.submit_layer(push, layer)

    def push_whole(self, blocks: range) -> None:
        self.source.transfer.submit(WholePush(step_id=-1, **self.job(blocks)))

    def check(self, round: int = 0) -> tuple[int, ...]:
        """Indices of the blocks whose digests differ."""
        job = self.job(range(self.num_blocks))
        valid = job.pop("num_valid")[-1]
        del job["destination_block_ids"]
        first_tokens = (FirstToken(0, 42, False),)
        final = Finalize(round=round, num_valid_last=valid, digest_key=self.key, first_tokens=first_tokens, **job)
        self.source.transfer.submit(final)
        ready = self.source.wait_for(ReadySent, round + 1).ready
        verify = Verify(KEY, self.grant.grant_id, round, self.grant.block_ids, ready.digests, self.key, valid)
        self.sink.transfer.submit(verify)
        return self.sink.wait_for(Verified, round + 1).bad_indices

    def expected(self) -> torch.Tensor:
        """The sink's pool, token by token."""
        after = self.untouched.clone()
        for token in range(NUM_TOKENS):
            block, slot = divmod(token, self.sizes.source)
            sink_block, sink_slot = divmod(token, self.sizes.sink)
            values = self.source.node.pool[SOURCE_BLOCKS[block], :, :, :, slot]
            stored = converted(values, self.source.node.layout, self.sink.node.layout)
            as_bytes(after)[SINK_BLOCKS[sink_block], :, :, :, sink_slot] = as_bytes(stored)
        return after

    def close(self) -> None:
        for side in (self.source, self.sink):
            assert side.transfer.stop(5.0)
            side.node.close()


def converted(values: torch.Tensor, ours: KVLayout, theirs: KVLayout) -> torch.Tensor:
    """[H, L, P, D] of one token, one layer and plane after the other."""
    if ours.group.dtype == theirs.group.dtype and scales(ours) == scales(theirs):
        return values
    dtype = getattr(torch, theirs.group.dtype)
    out = torch.empty(values.shape, dtype=dtype)
    for layer in range(values.shape[1]):
        for plane in range(2):
            meant = values[:, layer, plane].float() * scales(ours)[plane][layer] / scales(theirs)[plane][layer]
            limit = 448.0 if dtype == torch.float8_e4m3fn else math.inf
            out[:, layer, plane] = meant.clamp(-limit, limit).to(dtype)
    return out


def scales(layout: KVLayout) -> tuple[tuple[float, ...], ...]:
    ones = (1.0,) * layout.group.num_layers
    return layout.group.k_scales or ones, layout.group.v_scales or ones


def kept_as(dtype: str, block_size: int = 8, scales: tuple = ((), ())) -> KVLayout:
    layout = make_layout(block_size=block_size, dtype=dtype)
    group = msgspec.structs.replace(layout.group, k_scales=scales[0], v_scales=scales[1])
    return msgspec.structs.replace(layout, groups=(group,))


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


FP8 = "float8_e4m3fn"
SCALES = (0.5, 0.03, 2.0), (1.0, 0.25, 0.004)  # keys and values of three layers; 0.004: some values saturate
OTHER_SCALES = (1.0, 1.0, 0.125), (0.75, 2.0, 0.004)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (kept_as("float32"), kept_as("bfloat16")),
        (kept_as("bfloat16"), kept_as("float16", 12)),
        (kept_as("float32"), kept_as(FP8)),
        (kept_as("float32"), kept_as(FP8, 12, SCALES)),
        (kept_as("bfloat16", 12), kept_as(FP8, 8, SCALES)),
        (kept_as(FP8, 8, SCALES), kept_as("bfloat16")),
        (kept_as(FP8, 8, SCALES), kept_as(FP8, 8, SCALES)),
        (kept_as(FP8, 8, SCALES), kept_as(FP8, 12, OTHER_SCALES)),
    ],
    ids=lambda layout: f"{layout.group.dtype}-{layout.block_size}-{bool(layout.group.k_scales)}",
)
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
    monkeypatch.setattr("tandem.kv_connector.reshape.STAGED_BYTES", 3 * make_layout(block_size=4).payload_bytes)
    handoff = make("shm", make_layout(block_size=8), make_layout(block_size=4))
    handoff.push()
    assert handoff.check() == ()
    assert torch.equal(handoff.sink.node.pool, handoff.expected())


def test_a_sink_block_is_not_staged_of_too_many_source_blocks():
    sizes = BlockSizes(8, 4)
    with pytest.raises(AssertionError, match="more source blocks"):
        sizes.parts([1, 2, 3], [4, 0], [4, 4])
