"""Layers whose push waits until the device has written them. Belongs to the transfer thread.

Their copies are enqueued only then: a driver whose queue is full of waiting copies keeps its lock, and nothing else is
launched meanwhile. The last layer of a push, a launch or two, goes ahead of the device, since the hand-off's end
waits for it: a stream waits then, no thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Job = TypeVar("Job")


class Written(Protocol):
    """The interface of torch.cuda.Event that is used here: it says whether the device has got there."""

    def query(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Job]):
    """A push that waits for `written`; with `goes_ahead` it may be enqueued before."""

    grant_id: int
    job: Job
    written: Written
    goes_ahead: bool


class WaitingLayers(Generic[Job]):
    """Layers of one grant in the order in which they came; grants pass each other."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[Job]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, grant_id: int, job: Job, written: Written, goes_ahead: bool) -> None:
        """Adds a layer. With `goes_ahead` it goes as soon as the layers of its grant before it have gone."""
        self._waiting.append(Waiting(grant_id, job, written, goes_ahead))

    def take_written(self) -> Job | None:
        """Takes out the first layer that can go now; None if there is none."""
        held_up: set[int] = set()
        for index, each in enumerate(self._waiting):
            if each.grant_id not in held_up and (each.goes_ahead or each.written.query()):
                return self._waiting.pop(index).job
            held_up.add(each.grant_id)
        return None

    def take_all_of(self, grant_id: int | None) -> list[Job]:
        """Takes out all layers of this grant (None: of any), written or not, which must go before anything else of
        it."""
        taken = [each.job for each in self._waiting if grant_id in (None, each.grant_id)]
        self._waiting = [each for each in self._waiting if grant_id not in (None, each.grant_id)]
        return taken
