"""Digests that a source makes while it pushes: those of its blocks, whatever was pushed when, or made anew."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tandem.engine.contracts.keys import AttemptKey
from tandem.kernels.blocks.digest import block_digests
from tandem.kernels.blocks.digest_pass import SumPasses
from tandem.kv_connector.protocol.jobs import (
    BlockPush,
    Finalize,
    Flush,
    Flushed,
    PushFailed,
    ReadySent,
    Retire,
    Retired,
    digest_key,
)
from tandem.kv_connector.transfer.grant_sums import GrantSums
from tests.fakes.kv_pools import PoolNode, make_layout
from tests.fakes.transfer_side import Side, pairs

KEY = AttemptKey("r", 0)
LAYERS = 3
SIZE = 8  # slots of a block


@pytest.fixture
def make_sides():
    with pairs() as made:

        def make(transport: str = "local", fault_injection: str = "", **sink_layout) -> tuple[Side, Side]:
            options = {"layout": make_layout(**sink_layout)} if sink_layout else {}
            sink = PoolNode("d", transport, seed=2, **options)
            return made.make(PoolNode("p", transport, seed=1), sink, fault_injection)

        yield make


class Prompt:
    """Blocks `origins` of the source on their way into `grant`, of the last one `last` slots."""

    def __init__(self, source: Side, sink: Side, origins: list[int], last: int = SIZE) -> None:
        self.source, self.origins, self.last = source, origins, last
        self.grant = sink.node.grant(source.node.info, random.Random(3).sample(range(16), len(origins)))
        self.num_valid = (*[SIZE] * (len(origins) - 1), last)
        self.key = digest_key(KEY, self.grant.grant_id)
        self.round = 0

    def _blocks(self, places: range) -> tuple:
        span = slice(places.start, places.stop)
        return KEY, self.grant, tuple(self.origins[span]), self.grant.block_ids[span], self.num_valid[span]

    def whole(self, places: range) -> None:
        self.source.transfer.submit(BlockPush(*self._blocks(places), -1))

    def layers(self, places: range, layers: range = range(LAYERS)) -> None:
        push = BlockPush(*self._blocks(places))
        for layer in layers:
            self.source.transfer.submit_layers(push, range(layer, layer + 1))

    def digests(self) -> list[int]:
        final = Finalize(KEY, self.grant, self.round, tuple(self.origins), self.last, self.key, ())
        self.source.transfer.submit(final)
        self.round += 1
        return np.frombuffer(self.source.wait_for(ReadySent, self.round).ready.digests, "<i8").tolist()

    def expected(self) -> list[int]:
        return block_digests(self.source.node.pool, self.origins, self.key, self.last, SIZE).tolist()

    @property
    def num_passes_at_end(self) -> float:
        return self.source.transfer.counters["kv_digest_passes"]


@pytest.mark.parametrize("last", [1, 5, SIZE])
@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_all_is_summed_when_the_prompt_ends(make_sides, transport, last) -> None:
    """Its grant came late, so that one chunk goes whole; two more chunks go layer by layer."""
    prompt = Prompt(*make_sides(transport), [3, 9, 1, 12, 7, 0], last)
    prompt.whole(range(2))
    prompt.layers(range(2, 3))
    prompt.layers(range(3, 6))
    assert prompt.digests() == prompt.expected()
    assert prompt.num_passes_at_end == 0


def test_blocks_that_were_pushed_twice_are_summed_anew(make_sides) -> None:
    """After a preemption the prompt is computed again into other blocks; after a resend the sums have been taken."""
    source, sink = make_sides()
    prompt = Prompt(source, sink, [3, 9, 1])
    prompt.layers(range(2))
    prompt.origins = [4, 5, 6]
    prompt.layers(range(3))
    assert prompt.digests() == prompt.expected()
    assert prompt.num_passes_at_end == 1
    prompt.whole(range(1, 2))
    assert prompt.digests() == prompt.expected()


def test_a_part_that_was_not_pushed_to_its_end_is_summed_anew(make_sides) -> None:
    """Such as one whose other layers were pushed before: only the last one begins a sum of all."""
    prompt = Prompt(*make_sides(), [3, 9])
    prompt.whole(range(1))
    prompt.layers(range(1, 2), range(LAYERS - 1))
    assert prompt.digests() == prompt.expected()
    assert prompt.num_passes_at_end == 1


def test_a_last_block_of_another_length_is_summed_anew(make_sides) -> None:
    """A sequence that goes on is pushed while it runs; its length is known at the end."""
    prompt = Prompt(*make_sides(), [3, 9], last=6)
    prompt.layers(range(2))
    prompt.last = 4
    assert prompt.digests() == prompt.expected()
    assert prompt.num_passes_at_end == 1


def test_reshaped_blocks_are_summed_at_the_end(make_sides) -> None:
    source, sink = make_sides(dtype="bfloat16", block_size=SIZE)
    prompt = Prompt(source, sink, [3, 9])
    prompt.layers(range(2))
    assert len(prompt.digests()) == 2
    assert prompt.num_passes_at_end == 1


def test_a_push_that_fails_leaves_nothing_behind(make_sides) -> None:
    source, sink = make_sides()
    prompt = Prompt(source, sink, [3, 9])
    prompt.layers(range(1))
    source.transfer.submit(Flush(KEY, prompt.grant))
    source.wait_for(Flushed)
    assert source.transfer.sent_digests.num_grants == 1
    sink.node.transports.close_grant(prompt.grant.grant_id)
    prompt.layers(range(1, 2))
    source.wait_for(PushFailed)
    source.transfer.submit(Retire(KEY, prompt.grant))
    source.wait_for(Retired)
    assert source.transfer.sent_digests.num_grants == 0


def test_a_flush_that_fails_at_the_end_leaves_nothing_behind(make_sides) -> None:
    source, sink = make_sides("tcp")
    prompt = Prompt(source, sink, [3, 9])
    prompt.layers(range(2))
    source.transfer.submit(Flush(KEY, prompt.grant))
    source.wait_for(Flushed)
    sink.node.close()
    source.transfer.submit(Finalize(KEY, prompt.grant, 0, (3, 9), SIZE, prompt.key, ()))
    source.wait_for(PushFailed)
    source.transfer.submit(Retire(KEY, prompt.grant))
    source.wait_for(Retired)
    assert source.transfer.sent_digests.num_grants == 0


# --- sums of one grant -----------------------------------------------------------------------------------------


class RecordedPass:
    def __init__(self, sums: list[int]) -> None:
        self.sums_n, self.ended = np.array(sums, dtype=np.int64), []

    def sums(self) -> np.ndarray:
        self.ended.append("sums")
        return self.sums_n

    def abandon(self) -> None:
        self.ended.append("abandon")


def test_every_pass_is_ended_once(make_sides) -> None:
    source, sink = make_sides()
    grant = sink.node.grant(source.node.info, [4, 2, 9])
    job = Finalize(KEY, grant, 0, (0, 1, 2), SIZE, digest_key(KEY, grant.grant_id), ())
    for taken in (True, False):
        sums, passes = GrantSums(grant, LAYERS), [RecordedPass([1, 2]), RecordedPass([3])]
        sums.add_pass([4, 9], [SIZE] * 2, passes[0])
        assert not sums.are_whole(job, SIZE)
        sums.add_pass([2], [SIZE], passes[1])
        assert sums.are_whole(job, SIZE)
        if taken:
            sums.digests(job, SIZE)
        sums.abandon()
        assert [each.ended for each in passes] == [["sums" if taken else "abandon"]] * 2


def test_a_pass_reads_only_blocks_that_there_are() -> None:
    passes = SumPasses(torch.zeros(4, 1, 2, 2, SIZE, 4))
    with pytest.raises(IndexError, match="pool of 4"):
        passes.begin([0, 4], 1, [SIZE] * 2)
    assert passes.begin([], 1, []).sums().shape == (0,)
