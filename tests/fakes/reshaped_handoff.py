"""A prompt on its way between two pools of unlike layouts, with real transfer threads, and what must arrive."""

from __future__ import annotations

import math

import msgspec
import torch

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.parts import FirstToken
from tandem.kernels.blocks.quantization import as_bytes
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.protocol.jobs import BlockPush, Finalize, ReadySent, Verified, Verify, digest_key
from tests.fakes.kv_pools import PoolNode, make_layout
from tests.fakes.transfer_side import Side

KEY = AttemptKey("r", 0)
NUM_TOKENS = 43
SOURCE_BLOCKS, SINK_BLOCKS = (5, 2, 9, 14, 11, 3, 8, 1, 13, 6, 15), (4, 9, 2, 12, 7, 0, 10, 3, 1, 8, 11)


class Handoff:
    """A prompt of NUM_TOKENS tokens, in SOURCE_BLOCKS, on its way into SINK_BLOCKS."""

    def __init__(
        self,
        transport: str,
        ours: KVLayout,
        theirs: KVLayout,
        faults: str = "",
        devices: tuple[str, str] = ("cpu", "cpu"),
    ) -> None:
        self.sizes = BlockSizes(ours.block_size, theirs.block_size)
        self.source = Side(PoolNode("p", transport, seed=1, layout=ours, device=devices[0]), faults)
        self.sink = Side(PoolNode("d", transport, seed=2, layout=theirs, device=devices[1]))
        self.sink.node.admit(self.source.node.info)
        self.source.transfer.connect_peer(self.sink.node.info)
        self.num_blocks = self.sizes.num_sink_blocks(NUM_TOKENS)
        self.grant = self.sink.node.grant(self.source.node.info, SINK_BLOCKS[: self.num_blocks])
        self.key = digest_key(KEY, self.grant.grant_id)
        self.untouched = self.sink.node.pool.cpu().clone()

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
        push = BlockPush(**self.job(range(2, self.num_blocks)))
        for layer in range(self.source.node.layout.group.num_layers):
            self.source.transfer.submit_layers(push, range(layer, layer + 1))

    def push_whole(self, blocks: range) -> None:
        self.source.transfer.submit(BlockPush(step_id=-1, **self.job(blocks)))

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
        """The sink's pool, token by token, on the CPU."""
        pool, after = self.source.node.pool.cpu(), self.untouched.clone()
        for token in range(NUM_TOKENS):
            block, slot = divmod(token, self.sizes.source)
            sink_block, sink_slot = divmod(token, self.sizes.sink)
            values = pool[SOURCE_BLOCKS[block], :, :, :, slot]
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


FP8 = "float8_e4m3fn"
SCALES = (0.5, 0.03, 2.0), (1.0, 0.25, 0.004)  # keys and values of three layers; 0.004: some values saturate
OTHER_SCALES = (1.0, 1.0, 0.125), (0.75, 2.0, 0.004)
UNLIKE_NUMBERS = [
    (kept_as("float32"), kept_as("bfloat16")),
    (kept_as("bfloat16"), kept_as("float16", 12)),
    (kept_as("float32"), kept_as(FP8)),
    (kept_as("float32"), kept_as(FP8, 12, SCALES)),
    (kept_as("bfloat16", 12), kept_as(FP8, 8, SCALES)),
    (kept_as(FP8, 8, SCALES), kept_as("bfloat16")),
    (kept_as(FP8, 8, SCALES), kept_as(FP8, 8, SCALES)),
    (kept_as(FP8, 8, SCALES), kept_as(FP8, 12, OTHER_SCALES)),
]


def layout_id(layout: KVLayout) -> str:
    return f"{layout.group.dtype}-{layout.block_size}-{bool(layout.group.k_scales)}"
