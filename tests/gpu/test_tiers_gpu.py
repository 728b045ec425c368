"""Host memory of tiers beside a GPU: what is stored and restored, page-locking, and its end."""

from __future__ import annotations

import queue

import pytest
import torch

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.parallel.peer_memory import RankMemory
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.tiers.host import HostTier
from tandem.kv_connector.tiers.host_blocks import ExactBlocks, Fp8Blocks
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = (40, 8, 16, 2, 64, 128)  # blocks, heads, layers, planes, block_size, head_dim
NAMES = tuple(bytes([number]) * 16 for number in range(20))
SLOTS, TARGETS = tuple(range(19, -1, -1)), tuple(range(20, 40))


@pytest.fixture
def pool() -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = torch.exp2(torch.randint(-9, 9, (*SHAPE[:4], 1, 1), generator=generator, device="cuda").float())
    return (torch.randn(SHAPE, generator=generator, device="cuda") * sizes).bfloat16()


def run(tier: HostTier, done: queue.SimpleQueue[JobDone], job: Save | Load) -> None:
    tier.submit(job)
    answer = done.get(timeout=20)
    assert (answer.job, answer.bad) == (job, ())


@pytest.mark.parametrize("kind", [ExactBlocks, Fp8Blocks])
def test_what_comes_back_is_what_a_cpu_would_make_of_it(
    pool: torch.Tensor, kind: type[ExactBlocks] | type[Fp8Blocks]
) -> None:
    done = queue.SimpleQueue[JobDone]()
    tier = HostTier(pool, kind(pool, 20), done.put)
    tier.warm_up()
    twin, there = pool.cpu(), kind(pool[:1].cpu(), 20)
    there.store(twin, list(zip(range(20), SLOTS, strict=True)))
    there.restore(twin, list(zip(SLOTS, TARGETS, strict=True)))
    run(tier, done, Save(NAMES, tuple(range(20)), SLOTS, ((0,),) * 20, 0, ((),) * 20))
    assert torch.equal(tier.blocks.raw, there.raw)
    run(tier, done, Load(1, NAMES, SLOTS, TARGETS, ((),) * 20))
    assert torch.equal(pool.cpu(), twin)
    pool[20:].zero_()
    torch.cuda.synchronize()
    events = tier.step_load(Load(0, NAMES, SLOTS, TARGETS, ((),) * 20)).start(pool)
    for layer, event in events.items():
        event.wait()
        assert torch.equal(pool[20:, :, layer].cpu(), twin[20:, :, layer]), f"layer {layer} is late"
    assert done.get(timeout=20).bad == ()
    tier.close()


def test_ranks_keep_whole_blocks(pool: torch.Tensor) -> None:
    """Two pools with half of the heads each, here on one GPU."""
    done = queue.SimpleQueue[JobDone]()
    parts = [part.contiguous() for part in pool.chunk(2, 1)]
    layout = KVLayout((KVGroup(SHAPE[2], SHAPE[1], SHAPE[5], "bfloat16"),), SHAPE[4])
    ranks = RankPools(parts[0], layout, [RankMemory(part.data_ptr(), b"", 0) for part in parts])
    tier = HostTier(parts[0], ExactBlocks(ranks.new_blocks(1), 20), done.put, ranks)
    tier.warm_up()
    run(tier, done, Save(NAMES, tuple(range(20)), SLOTS, ((0,),) * 20, 0, ((),) * 20))
    run(tier, done, Load(1, NAMES, SLOTS, TARGETS, ((),) * 20))
    torch.cuda.synchronize()
    for part, own in zip(parts, pool.chunk(2, 1), strict=True):
        assert torch.equal(part[:20], own[:20])
        assert torch.equal(part[20:], own[:20])
    tier.close()


def test_memory_is_unlocked_at_the_end_and_a_failure_leaves_no_trace(pool: torch.Tensor) -> None:
    for explicitly in (True, False) * 3:
        blocks = ExactBlocks(pool, 20)
        blocks.lock(0)
        assert blocks.raw.is_pinned()
        if explicitly:
            blocks.close()
            blocks.close()
            assert not blocks.raw.is_pinned()
        del blocks
    with pytest.raises(ConfigError, match="host tier of"):
        ExactBlocks(pool, 1 << 28)
    assert float(torch.ones(3, device="cuda").sum()) == 3.0
