"""Items of running sequences: encoded when a row needs them and once, in the right rows, at the right positions."""

from __future__ import annotations

import numpy as np
import torch

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.media.encoder import EncodeError
from tandem.engine.media.encoder_outputs import EncoderOutputs
from tandem.engine.media.slots import MediaSlots
from tandem.engine.scheduling.step import ForkSlot, NewSlot, ScheduledRow

CPU = torch.device("cpu")


class Encoder:
    """Embeds token i of an item as [its first value, i]; its positions are those of a row of pictures two high."""

    kinds = frozenset({"image"})

    def __init__(self, has_positions: bool) -> None:
        self.has_positions = has_positions
        self.encoded: list[bytes] = []

    def encode(self, item: MediaItem) -> torch.Tensor:
        self.encoded.append(item.digest)
        first = float(item.arrays()["x"][0])
        return torch.tensor([[first, float(i)] for i in range(item.length)])

    def positions(self, item: MediaItem) -> np.ndarray:
        half = np.arange(item.length)
        return np.stack([0 * half, half % 2, half // 2])


def item(start: int, length: int, value: float) -> MediaItem:
    return MediaItem.of(start, length, "image", {"x": np.array([value], np.float32)})


def new(slot: int, *media: MediaItem) -> NewSlot:
    return NewSlot(slot, np.zeros(1, np.int32), 1, (), SamplingParams(max_tokens=1), 0, media)


def inputs(rows: list[ScheduledRow], order: list[int]) -> tuple[np.ndarray, torch.Tensor]:
    """(where each row begins, all positions) of the rows computed in this order."""
    starts, positions = np.zeros(len(rows), np.int64), []
    for index in order:
        starts[index] = sum(map(len, positions))
        positions.append(np.arange(rows[index].start, rows[index].start + rows[index].num_tokens))
    return starts, torch.from_numpy(np.concatenate(positions))


def test_rows_find_their_items_wherever_they_are_cut():
    encoder = Encoder(has_positions=False)
    slots = MediaSlots(encoder, 4, 1 << 20, CPU)
    slots.apply([new(0, item(2, 4, 1.0), item(8, 4, 2.0)), new(1)])
    rows = [ScheduledRow(0, 4, 6), ScheduledRow(1, 0, 3)]
    found = slots.of(rows, *inputs(rows, [1, 0]))
    assert found is not None
    assert found.index_M is not None
    assert found.embedding_ME is not None
    assert found.index_M.tolist() == [3, 4, 7, 8]  # tokens 4, 5, 8 and 9 of slot 0, after the three of slot 1
    assert found.embedding_ME.tolist() == [[1.0, 2.0], [1.0, 3.0], [2.0, 0.0], [2.0, 1.0]]
    assert found.positions_3T is None
    assert slots.touch(rows)
    rest = [ScheduledRow(0, 10, 5)]
    assert slots.of(rest, *inputs(rest, [0])).index_M.tolist() == [0, 1]  # type: ignore[union-attr]
    assert len(encoder.encoded) == 2, "encoded once each"
    after = [ScheduledRow(0, 12, 1), ScheduledRow(1, 0, 3)]
    assert slots.of(after, *inputs(after, [0, 1])) is None
    assert not slots.touch(after)


def test_what_no_row_needs_is_not_encoded():
    encoder = Encoder(has_positions=True)
    slots = MediaSlots(encoder, 4, 1 << 20, CPU)
    slots.apply([new(0, item(0, 4, 1.0))])
    rows = [ScheduledRow(0, 6, 2)]
    found = slots.of(rows, *inputs(rows, [0]))
    assert found is not None
    assert found.embedding_ME is None
    assert not encoder.encoded
    assert found.positions_3T is not None
    assert found.positions_3T.tolist() == [[4, 5]] * 3  # the item took positions 0 and 1


def test_positions_go_on_behind_an_items_largest_and_forks_keep_them():
    slots = MediaSlots(Encoder(has_positions=True), 4, 1 << 20, CPU)
    slots.apply([new(1, item(2, 6, 1.0)), new(2)])
    rows = [ScheduledRow(1, 0, 10), ScheduledRow(2, 0, 2)]
    found = slots.of(rows, *inputs(rows, [0, 1]))
    assert found is not None
    assert found.positions_3T is not None
    assert found.positions_3T.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 0, 1],
        [0, 1, 2, 3, 2, 3, 2, 3, 5, 6, 0, 1],
        [0, 1, 2, 2, 3, 3, 4, 4, 5, 6, 0, 1],
    ]
    assert slots.shift_S is not None
    slots.fork([ForkSlot(3, 1, 10, (), 1)])
    assert slots.shift_S.tolist() == [0, -3, 0, -3]
    slots.apply([new(1)])
    assert slots.shift_S.tolist() == [0, 0, 0, -3]


def test_items_without_positions_fail_their_slot_alone():
    class Choosy(Encoder):
        def positions(self, item: MediaItem) -> np.ndarray:
            if item.length == 5:
                raise EncodeError("five")
            return super().positions(item)

    slots = MediaSlots(Choosy(has_positions=True), 4, 1 << 20, CPU)
    assert slots.apply([new(0, item(0, 5, 1.0)), new(1, item(0, 6, 1.0))]) == {0: "five"}
    assert slots.shift_S is not None
    assert slots.shift_S.tolist() == [0, -3, 0, 0]


def test_outputs_are_kept_within_their_budget_and_the_newest_always():
    encoder = Encoder(has_positions=False)
    outputs = EncoderOutputs(encoder, budget_bytes=2 * 4 * 8)  # two of 4 tokens
    a, b, c, large = item(0, 4, 1.0), item(0, 4, 2.0), item(0, 4, 3.0), item(0, 50, 4.0)
    for each in (a, b, a, c, a, b):  # c takes the place of b, the least recently used
        outputs.of(each)
        outputs.check_integrity()
    assert encoder.encoded == [a.digest, b.digest, c.digest, b.digest]
    for _ in range(2):
        outputs.of(large)
        outputs.check_integrity()
    assert encoder.encoded.count(large.digest) == 1
    assert outputs.counters == {"media_encoded": 5, "media_reused": 3}
