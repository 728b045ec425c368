"""What the engine hands to decode kernels as the batch and its block tables change, on CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.prefix_sharing import PrefixSharing
from tandem.engine.scheduling.step import BlockAppend, ForkSlot, NewSlot, ScheduledRow
from tandem.kernels.api.attention import Attention
from tandem.kernels.prefixes import prefix_groups
from tandem.kernels.prefixes.prefix_groups import SharingCosts

BLOCK, PREFIX, LENGTH = 64, 100, 6500
COSTS = SharingCosts(4, 16384)


@pytest.fixture(autouse=True)
def _share_whatever_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_ROW", 0)
    monkeypatch.setattr(prefix_groups, "BYTES_FOR_LAUNCHES", 0)


def make_state(num_slots: int) -> BatchState:
    return BatchState(num_slots, 8192, BLOCK, 32, (), torch.device("cpu"))


def enter(state: BatchState, slot: int, blocks: tuple[int, ...]) -> None:
    tokens = np.zeros(LENGTH, np.int32)
    state.apply([NewSlot(slot, tokens, LENGTH, blocks, SamplingParams(temperature=0.0), 0)], [])


def own(slot: int) -> tuple[int, ...]:
    """Blocks of a slot's own behind the common prefix."""
    return (*range(PREFIX), 200 + 10 * slot, 201 + 10 * slot)


def rows(*slots: int) -> list[ScheduledRow]:
    return [ScheduledRow(slot, LENGTH, 1) for slot in slots]


def test_sharing_follows_slots_that_come_and_change() -> None:
    state = make_state(4)
    sharing = PrefixSharing(state, 4, COSTS)
    for slot in range(3):
        enter(state, slot, own(slot))
    found = sharing.of_rows(rows(2, 0, 1))
    assert found is not None
    assert found.row_lens.tolist() == [PREFIX * BLOCK] * 3
    assert found.chunk_rows[0].tolist() == [0, 1, 2, -1]
    assert found.chunk_lens.tolist() == [PREFIX * BLOCK, 0]
    assert found.saved_bytes == 2 * PREFIX * BLOCK * COSTS.token_bytes, "two of three don't read it"
    assert sharing.of_rows(rows(1)) is None
    enter(state, 0, tuple(range(300, 402)))
    found = sharing.of_rows(rows(2, 0, 1))
    assert found is not None
    assert found.row_lens.tolist() == [PREFIX * BLOCK, 0, PREFIX * BLOCK]
    enter(state, 1, tuple(range(500, 602)))
    assert sharing.of_rows(rows(2, 0, 1)) is None
    assert sharing.of_rows([]) is None


def test_forks_share_and_appended_blocks_change_nothing() -> None:
    state = make_state(4)
    sharing = PrefixSharing(state, 4, COSTS)
    enter(state, 1, own(1))
    assert sharing.of_rows(rows(1)) is None
    state.fork([ForkSlot(3, 1, LENGTH, own(3), 1)])
    found = sharing.of_rows(rows(3, 1))
    assert found is not None
    assert found.row_lens.tolist() == [PREFIX * BLOCK] * 2
    before = found.chunk_rows.clone()
    state.apply([], [BlockAppend(1, 102, 700), BlockAppend(3, 102, 701)])
    assert state.host_block_table_SB[3].tolist() == state.block_table_SB[3].tolist()
    found = sharing.of_rows(rows(3, 1))
    assert found is not None
    assert torch.equal(found.chunk_rows, before)


def test_a_rows_last_token_and_partly_filled_blocks_are_not_shared() -> None:
    state = make_state(2)
    sharing = PrefixSharing(state, 2, COSTS)
    for slot in range(2):
        enter(state, slot, tuple(range(102)))
    found = sharing.of_rows([ScheduledRow(0, PREFIX * BLOCK, 1), ScheduledRow(1, PREFIX * BLOCK - 1, 1)])
    assert found is not None
    assert found.row_lens.tolist() == [(PREFIX - 1) * BLOCK] * 2


def test_nothing_is_valid_and_forgets_the_batch() -> None:
    state = make_state(2)
    sharing = PrefixSharing(state, 2, COSTS)
    for slot in range(2):
        enter(state, slot, own(slot))
    assert sharing.of_rows(rows(0, 1)) is not None
    assert not sharing.nothing(2).row_lens.any()
    found = sharing.of_rows(rows(0, 1))
    assert found is not None
    assert found.row_lens.all()


def test_layers_that_cannot_share_make_none() -> None:
    """On CPU no backend reads a prefix once."""
    layer = Attention(4, 16, 0.25, 2, layer_name="a")
    layer.kv_cache[0] = torch.zeros(3, 2, 2, 16, 16)
    assert PrefixSharing.for_layers([layer], make_state(2), 2) is None
