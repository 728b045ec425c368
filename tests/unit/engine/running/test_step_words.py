"""What a replayed step's device buffers hold, and when nothing has to be sent."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tandem.engine.running.graphs.step_words import StepWords
from tandem.engine.scheduling.step import ScheduledRow

CPU = torch.device("cpu")


def held_by(words: StepWords, size: int) -> list[list[int]]:
    return words.buffer(size)[:, :size].tolist()


def rows_at(*places: tuple[int, int]) -> list[ScheduledRow]:
    return [ScheduledRow(slot, start, 1) for slot, start in places]


def add_one(slot_R: torch.Tensor, position_R: torch.Tensor) -> None:
    position_R += (slot_R >= 0).to(torch.int64)


def test_rows_that_go_on_where_they_were_send_nothing() -> None:
    words = StepWords(CPU)
    words.fill(rows_at((3, 9), (1, 70)), 4)
    assert held_by(words, 4) == [[3, 1, -1, -1], [9, 70, 0, 0]]
    words.advance(2, add_one)
    assert held_by(words, 4) == [[3, 1, -1, -1], [10, 71, 0, 0]]
    words.buffer(4)[0, 3] = -7  # what a copy would overwrite
    words.fill(rows_at((3, 10), (1, 71)), 4)
    assert held_by(words, 4) == [[3, 1, -1, -7], [10, 71, 0, 0]]
    slot_R, position_R = words.newest(1)
    assert (slot_R.tolist(), position_R.tolist()) == ([3], [10])


@pytest.mark.parametrize("changed", [((1, 70), (3, 10)), ((3, 10),), ((3, 10), (1, 72)), ((3, 10), (1, 71), (0, 4))])
def test_other_rows_are_sent(changed: tuple[tuple[int, int], ...]) -> None:
    words = StepWords(CPU)
    words.fill(rows_at((3, 9), (1, 70)), 4)
    words.advance(2, add_one)
    words.fill(rows_at(*changed), 4)
    padding = 4 - len(changed)
    assert held_by(words, 4) == [
        [*(slot for slot, _ in changed), *[-1] * padding],
        [*(start for _, start in changed), *[0] * padding],
    ]


def test_sizes_hold_words_of_their_own() -> None:
    """A step of another size changes none of them."""
    words = StepWords(CPU)
    words.fill(rows_at((3, 9)), 1)
    words.advance(1, add_one)
    words.fill(rows_at((3, 10)), 2)
    words.advance(1, add_one)
    words.fill(rows_at((3, 11)), 1)
    assert held_by(words, 1) == [[3], [11]]
    assert held_by(words, 2) == [[3, -1], [11, 0]]


def test_nothing_is_known_behind_a_launch_that_failed() -> None:
    words = StepWords(CPU)
    words.fill(rows_at((3, 9)), 1)

    def refuse(slot_R: torch.Tensor, position_R: torch.Tensor) -> None:
        add_one(slot_R, position_R)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        words.advance(1, refuse)
    words.fill(rows_at((3, 9)), 1)
    assert held_by(words, 1) == [[3], [9]]


def test_a_head_s_links_come_behind() -> None:
    words = StepWords(CPU, lambda slot_G, position_G: np.stack((slot_G, position_G, slot_G + position_G)))
    words.fill(rows_at((3, 9)), 2)
    assert held_by(words, 2) == [[3, -1], [9, 0], [3, -1], [9, 0], [12, -1]]
