"""Blocks whose heads lie in several pools, gathered, spread, reshaped and digested by kernels in the interpreter.

Run by test_triton_interpreter.py in a process of its own.
"""

from __future__ import annotations

import queue

import msgspec
import pytest
import torch
from waiting import PATIENCE_S

from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.parallel.peer_memory import RankMemory
from tandem.kernels.blocks import digest
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.layouts.reshape import Reshaper
from tandem.kv_connector.tiers.host import HostTier
from tandem.kv_connector.tiers.host_blocks import ExactBlocks, Fp8Blocks
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save
from tandem.kv_connector.transports.base import PairSums, Write
from tandem.kv_connector.transports.mapped.cuda_ipc import sum_blocks
from tests.fakes.kv_pools import grant_of

LAYOUT = KVLayout((KVGroup(num_layers=3, num_kv_heads=4, head_dim=4, dtype="float32"),), block_size=4)


def split(whole: torch.Tensor, num_ranks: int) -> tuple[list[torch.Tensor], RankPools]:
    """Where there are more ranks than the four heads, neighbours hold copies."""
    held = [rank * 4 // num_ranks for rank in range(num_ranks)]
    parts = [whole[:, first : first + max(1, 4 // num_ranks)].contiguous() for first in held]
    memories = [RankMemory(part.data_ptr(), b"", 0) for part in parts]
    return parts, RankPools(parts[0], LAYOUT, memories)


def pool_of(num_blocks: int) -> torch.Tensor:
    return torch.randn(num_blocks, 4, 3, 2, 4, 4)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_blocks_are_gathered_and_spread(num_ranks: int) -> None:
    whole = pool_of(6)
    parts, ranks = split(whole, num_ranks)
    out = torch.zeros(3, 4, 3, 2, 4, 4)
    ranks.gather([5, 0], range(1, 3), out)
    assert torch.equal(out[:2, :, 1:], whole[[5, 0], :, 1:])
    assert not out[:, :, 0].any()
    assert not out[2].any()
    new = pool_of(2)
    ranks.scatter(new, [3, 1], range(2), [4, 3])
    whole[3, :, :2], whole[1, :, :2, :, :3] = new[0, :, :2], new[1, :, :2, :, :3]
    for part, expected in zip(parts, split(whole, num_ranks)[0], strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("kind", [ExactBlocks, Fp8Blocks])
def test_tiers_keep_whole_blocks(kind: type[ExactBlocks] | type[Fp8Blocks], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a pool that has all heads; they come back into every rank's pool."""
    monkeypatch.setattr("tandem.kv_connector.layouts.rank_pools.GATHERED_BYTES", 2 * LAYOUT.payload_bytes)
    whole, names, done = pool_of(6), (b"a", b"b", b"c"), queue.SimpleQueue[JobDone]()
    parts, ranks = split(whole, 2)
    one, several = HostTier(whole, kind(whole, 4), done.put), HostTier(parts[0], kind(whole, 4), done.put, ranks)
    for tier in (one, several):
        tier.warm_up()
        tier.submit(Save(names, (4, 5, 2), (3, 1, 0), ((0,),) * 3, 0, ((),) * 3))
        assert done.get(timeout=PATIENCE_S).bad == ()
        tier.submit(Load(1, names, (3, 1, 0), (1, 0, 3), ((),) * 3))
        assert done.get(timeout=PATIENCE_S).bad == ()
        tier.close()
    assert torch.equal(several.blocks.raw[[0, 1, 3]], one.blocks.raw[[0, 1, 3]])
    changed = [0, 1, 3]
    assert torch.equal(torch.cat(parts, 1)[changed], whole[changed])


@pytest.mark.parametrize("at_once", [1, 8])
def test_digests_are_those_of_whole_blocks(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.kv_connector.layouts.rank_pools.GATHERED_BYTES", at_once * LAYOUT.payload_bytes)
    whole = pool_of(6)
    _, ranks = split(whole, 2)
    assert torch.equal(ranks.digests([2, 5, 1], 77, 3), digest.block_digests(whole, [2, 5, 1], 77, 3, 4))


@pytest.mark.parametrize(("block_size", "dtype"), [(4, "float32"), (6, "float32"), (6, "bfloat16")])
def test_what_is_staged_is_what_one_pool_gives(block_size: int, dtype: str) -> None:
    whole = pool_of(8)
    parts, ranks = split(whole, 2)
    group = msgspec.structs.replace(LAYOUT.group, dtype=dtype)
    sink = KVLayout((group,), block_size)
    sizes, blocks, num_tokens = BlockSizes(4, block_size), (5, 2, 7, 0), 15
    wanted = range(sizes.num_sink_blocks(num_tokens))
    valid = [sizes.num_valid(block, num_tokens) for block in wanted]
    origins = [sizes.origin(*each) for each in zip(wanted, valid, strict=True)]
    ids, slots = [blocks[block] for origin, _ in origins for block in origin], [first for _, first in origins]
    staged = []
    for reshaper in (Reshaper(whole, LAYOUT, sink), Reshaper(parts[0], LAYOUT, sink, ranks)):
        out = torch.zeros(len(wanted), 4, 3, 2, block_size, 4)
        for layers in (range(1), range(1, 3)):
            span = slice(layers.start, layers.stop)
            for index, block in enumerate(reshaper.stage(reshaper.parts(ids, slots, valid), layers)[: len(wanted)]):
                out[index, :, span, :, : valid[index]] = block[:, span, :, : valid[index]].float()
        staged.append(out)
        digests = reshaper.digests(reshaper.parts(ids, slots, valid), 5, valid[-1])
        assert len(digests) == len(wanted)
    assert torch.equal(*staged)


def test_partly_filled_blocks_are_summed_where_they_are() -> None:
    source = pool_of(6)
    before, sums = source.clone(), digest.BlockSums.of_none(source, 3, 99)
    node = NodeInfo(node_id="d", epoch=1, role="unified", layout=LAYOUT)
    grant = grant_of(node, node, range(3))
    for layers in (range(1), range(1, 3)):
        write = Write(grant, [(4, 0), (2, 1), (5, 2)], layers, [4, 4, 3], PairSums(sums, [1, 0, 2]))
        sum_blocks(source, write)
    assert torch.equal(source, before)
    assert torch.equal(sums.digests(3, 4), digest.block_digests(source, [2, 4, 5], 99, 3, 4))
