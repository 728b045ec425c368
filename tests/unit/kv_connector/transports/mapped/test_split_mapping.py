"""A pool in several memories is written as one pool is, each memory its heads; what can't hold a pool is not mapped."""

from __future__ import annotations

import random

import pytest
import torch

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kernels.blocks.digest import SEGMENT_WORDS, BlockSums, block_digests
from tandem.kv_connector.transports.base import PairSums, Write
from tandem.kv_connector.transports.mapped.cuda_ipc import CudaIpcHandle, fits, sum_blocks
from tandem.kv_connector.transports.mapped.shm import ShmMapping
from tandem.kv_connector.transports.mapped.split import SplitMapping
from tandem.kv_connector.transports.node_transports import make_transports
from tests.fakes.kv_pools import KEYS, expected_after, grant_of, make_layout, random_write

LAYOUT = make_layout(heads=4)
NODE = NodeInfo(node_id="d", epoch=1, role="unified", layout=LAYOUT)
GRANT = grant_of(NODE, NODE, range(8))
HANDLE = b"h" * 64
BYTES = LAYOUT.payload_bytes


def pool(heads: int) -> torch.Tensor:
    return torch.randn(8, heads, 3, 2, 8, 4)


@pytest.mark.parametrize("num_heads", [(2, 2), (1, 3)])
def test_every_memory_gets_its_heads(num_heads: tuple[int, int]) -> None:
    parts, source = [pool(count) for count in num_heads], pool(4)
    runs = (range(num_heads[0]), range(num_heads[0], 4))
    mapping = SplitMapping([(heads, ShmMapping(part)) for heads, part in zip(runs, parts, strict=True)])
    rng = random.Random(7)
    for _ in range(12):
        pairs, layers, num_valid = random_write(rng, 8, LAYOUT, range(8))
        expected = expected_after(torch.cat(parts, 1), source, pairs, layers, num_valid)
        assert mapping.copy_in(source, Write(GRANT, pairs, layers, num_valid))
        mapping.flush(GRANT.grant_id)
        assert torch.equal(torch.cat(parts, 1), expected)
    mapping.close()
    before = torch.cat(parts, 1)
    assert not mapping.copy_in(source, Write(GRANT, [(0, 1)], None, [8]))
    assert torch.equal(torch.cat(parts, 1), before)


def add_layers_eagerly(
    self: BlockSums, pool_NHLPBD: torch.Tensor, listed_4N: torch.Tensor, layers: range | None
) -> None:
    """What the kernel behind `BlockSums.add_layers` does, on a CPU."""
    words_NHLW = pool_NHLPBD.flatten(3).view(torch.int64)
    _, heads, num_layers, layer_words = words_NHLW.shape
    chosen = layers or range(num_layers)
    at_HL = torch.arange(heads)[:, None] * num_layers + torch.arange(chosen.start, chosen.stop)
    at_HLW = at_HL[..., None] * layer_words + torch.arange(layer_words)
    keys_HLW2 = self.keys_S2[at_HLW // SEGMENT_WORDS]
    first, second = ((self.table[i][at_HLW % SEGMENT_WORDS] ^ keys_HLW2[..., i]) | 1 for i in (0, 1))
    for block, index in zip(listed_4N[0].tolist(), listed_4N[3].tolist(), strict=True):
        words = words_NHLW[block, :, chosen.start : chosen.stop]
        self.sums_N[index] += (words * first + (words >> 32) * second).sum()


def test_digests_are_of_blocks_with_all_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here of whole blocks alone: what sums others is a kernel."""
    monkeypatch.setattr(BlockSums, "add_layers", add_layers_eagerly)
    parts, source = [pool(2), pool(2)], pool(4)
    runs = (range(2), range(2, 4))
    mapping = SplitMapping([(heads, ShmMapping(part)) for heads, part in zip(runs, parts, strict=True)], sum_blocks)
    assert mapping.sums_blocks
    pairs, sums = [(5, 0), (2, 7), (1, 3)], BlockSums.of_none(source, 3, 99)
    for layers in (range(2), range(2, 3)):
        assert mapping.copy_in(source, Write(GRANT, pairs, layers, [8] * 3, PairSums(sums, [2, 0, 1])))
    arrived = block_digests(torch.cat(parts, 1), [7, 3, 0], 99, 8, 8)
    assert torch.equal(sums.digests(8, 8), arrived)


@pytest.mark.parametrize(
    ("handles", "fit"),
    [
        ([CudaIpcHandle(HANDLE, 0, BYTES, 4)], True),
        ([CudaIpcHandle(HANDLE, 0, BYTES + 8, 4)], False),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2, 2)] * 2, True),
        ([CudaIpcHandle(HANDLE, 64, BYTES // 4, 1)] * 4, True),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2, 2)], False),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2 - 8, 2)] * 2, False),
        ([CudaIpcHandle(HANDLE[:9], 0, BYTES // 2, 2)] * 2, False),
        ([CudaIpcHandle(HANDLE, -8, BYTES // 2, 2)] * 2, False),
        ([CudaIpcHandle(HANDLE, 0, BYTES, 5), CudaIpcHandle(HANDLE, 0, BYTES, -1)], False),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2, 2, first) for first in (0, 0, 2, 2)], True),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2, 2, first) for first in (2, 2)], False),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2, 2, first) for first in (0, 3)], False),
        ([CudaIpcHandle(HANDLE, 0, BYTES // 2, 2, first) for first in (0, -1, 2)], False),
        ([], False),
    ],
)
def test_what_is_exported_must_hold_every_head(handles: list[CudaIpcHandle], fit: bool) -> None:
    assert fits(handles, LAYOUT) == fit


def test_a_transport_that_reaches_one_gpu_is_not_offered_by_ranks() -> None:
    cpu = torch.device("cpu")
    assert [each.name for each in make_transports("auto", cpu, KEYS, "127.0.0.1", 5.0, has_ranks=True)] == ["tcp"]
    with pytest.raises(ConfigError, match=r"shm can't be used: of the GPUs of several ranks .*; or choose auto"):
        make_transports("shm", cpu, KEYS, "127.0.0.1", 5.0, has_ranks=True)
