"""Jobs that wait until the device has written what they push. Belongs to the transfer thread.

Copies of layers are enqueued only then: a driver whose queue is full of waiting copies keeps its lock, and nothing else
is launched meanwhile. The last layer of a push, a launch or two, goes ahead of the device, since the hand-off's end
waits for it: a stream waits then, no thread.

While a launched step waits for a peer nothing goes ahead: there is one stream of pushes, and the peer may wait for what
would be enqueued behind it.
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
    """A job that waits for `written`, None: only for those of its grant before it; with `goes_ahead` it may be enqueued
    before."""

    grant_id: int
    job: Job
    written: Written | None
    goes_ahead: bool

    @property
    def is_written(self) -> bool:
        return self.written is None or self.written.query()


class WaitingJobs(Generic[Job]):
    """Jobs of one grant in the order in which they came; grants pass each other."""

    def __init__(self) -> None:
        self._waiting: list[Waiting[Job]] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, grant_id: int, job: Job, written: Written | None, goes_ahead: bool = False) -> None:
        """Adds a job. With `goes_ahead` it may go as soon as those of its grant before it have gone."""
        self._waiting.append(Waiting(grant_id, job, written, goes_ahead))

    def take_next(self, may_go_ahead: bool = True) -> Job | None:
        """Takes out the first job that can go now; None if there is none."""
        held_up: set[int] = set()
        for index, each in enumerate(self._waiting):
            goes_ahead = each.goes_ahead and may_go_ahead
            if each.grant_id not in held_up and (goes_ahead or each.is_written):
                return self._waiting.pop(index).job
            held_up.add(each.grant_id)
        return None

    def are_written(self, grant_id: int) -> bool:
        """Whether the device has written all that waits of this grant."""
        return all(each.is_written for each in self._waiting if each.grant_id == grant_id)

    def take_all_of(self, grant_id: int | None) -> list[Job]:
        """Takes out all jobs of this grant (None: of any), written or not, which must go before anything else of
        it."""
        taken = [each.job for each in self._waiting if grant_id in (None, each.grant_id)]
        self._waiting = [each for each in self._waiting if grant_id not in (None, each.grant_id)]
        return taken
