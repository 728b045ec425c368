"""What the router processes of one group place, told to each other at once, through a file that all of them map.

Each process alone writes its part of the file: how many placements it has told, then the newest of them in a ring. The
others look at the count before they place. Nobody waits for anybody. A record that is read while it is written, or
overwritten before it was read, makes placement worse for a heartbeat, and no answer wrong.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

RING = 4096  # placements: about as many as a process makes in a second at most; a guess
_WORD_BYTES = 8


class Told(NamedTuple):
    """A placement on a node, as in `NodeView.note_placement` and `Outlook.note_placement`."""

    tag: int  # NodeView.tag of the node
    num_tokens: int
    num_sequences: int
    num_new_tokens: int
    num_streams: int
    due_ms: int  # until the first token
    num_stream_tokens: int = 0  # context of the streams


_RECORD = len(Told._fields)


@dataclass(frozen=True)
class Seat:
    """One process's place among `num_seats`; a successor takes its predecessor's. `ring`: placements in each part."""

    path: str
    index: int
    num_seats: int
    ring: int

    @property
    def part(self) -> int:
        """Words of a process's part."""
        return 1 + self.ring * _RECORD

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return self.num_seats * self.part * _WORD_BYTES


def make_seats(path: Path, num_seats: int, ring: int = RING) -> list[Seat]:
    """Makes the file, and says where in it each process writes."""
    seats = [Seat(str(path), index, num_seats, ring) for index in range(num_seats)]
    with path.open("xb") as file:
        file.truncate(seats[0].num_bytes)
    return seats


class Siblings:
    """The other processes, as one of them sees them. What was told before it came is not told again."""

    def __init__(self, seat: Seat) -> None:
        with open(seat.path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), seat.num_bytes)
        self._words = memoryview(self._map).cast("Q")
        self._ring, self._own = seat.ring, seat.index * seat.part
        others = [index * seat.part for index in range(seat.num_seats) if index != seat.index]
        self._heard = {start: self._words[start] for start in others}

    def tell(self, told: Told) -> None:
        words, number = self._words, self._words[self._own]
        at = self._own + 1 + number % self._ring * _RECORD
        for offset, value in enumerate(told):
            words[at + offset] = value
        words[self._own] = number + 1  # last: from here on the others read the record

    def news(self) -> list[Told]:
        """What the others have told since the last call; of each process only what its ring still has."""
        words, news = self._words, []
        for start, heard in self._heard.items():
            count = words[start]
            if count == heard:
                continue
            for number in range(max(heard, count - self._ring), count):
                at = start + 1 + number % self._ring * _RECORD
                news.append(Told(*words[at : at + _RECORD]))
            self._heard[start] = count
        return news

    def close(self) -> None:
        self._words.release()
        self._map.close()
