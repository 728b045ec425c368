"""A step cut into pieces that follow each other: the same tokens and samples, in less memory at once. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from tandem.engine.scheduling.step import ScheduledRow, SchedulerOutput


@dataclass(slots=True)
class StepPiece:
    """A part of a step. `rows[i]` is (a part of) row `parents[i]` of the step. `samples` are indices of the step's
    samples that become possible here; sample `samples[k]` comes after the last token of `rows[sampled[k]]`."""

    rows: list[ScheduledRow] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


def split_step(output: SchedulerOutput, max_tokens: int) -> list[StepPiece]:
    """Pieces of at most `max_tokens` tokens. A row that is cut goes on in the next piece, where its KV so far is
    context. What fits is one piece, the step as it is, in the order of the step's samples."""
    assert max_tokens > 0
    if output.num_tokens <= max_tokens:
        sampled = [sample.row for sample in output.samples]
        return [StepPiece(list(output.rows), list(range(len(output.rows))), list(range(len(sampled))), sampled)]
    samples_of: dict[int, list[int]] = {}
    for index, sample in enumerate(output.samples):
        samples_of.setdefault(sample.row, []).append(index)
    pieces = [StepPiece()]
    room = max_tokens
    for parent, row in enumerate(output.rows):
        done = 0
        while done < row.num_tokens:
            if room == 0:
                pieces.append(StepPiece())
                room = max_tokens
            count = min(room, row.num_tokens - done)
            pieces[-1].rows.append(msgspec.structs.replace(row, start=row.start + done, num_tokens=count))
            pieces[-1].parents.append(parent)
            done += count
            room -= count
        _add_samples(pieces[-1], samples_of.get(parent, []))
    return pieces


def _add_samples(piece: StepPiece, samples: list[int]) -> None:
    piece.samples += samples
    piece.sampled += [len(piece.rows) - 1] * len(samples)
