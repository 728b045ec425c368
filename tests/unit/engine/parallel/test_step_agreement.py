"""Processes that agree on each step: real sockets, an end a thread."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from waiting import PATIENCE_S, wait_until

from tandem.engine.parallel import step_agreement
from tandem.engine.parallel.step_agreement import StepAgreement
from tandem.engine.process.watched import watched_thread


class Group:
    """`lost[r]`: what rank r was told of others that ended."""

    def __init__(self, size: int, stuck_s: float = PATIENCE_S) -> None:
        links: list[dict[int, socket.socket]] = [{} for _ in range(size)]
        for one in range(size):
            for other in range(one):
                links[one][other], links[other][one] = socket.socketpair()
        self.lost: list[list[str]] = [[] for _ in range(size)]
        self.ends = [StepAgreement(own, lost.append, stuck_s) for own, lost in zip(links, self.lost, strict=True)]

    def close(self) -> None:
        for end in self.ends:
            end.close()


@pytest.fixture
def three() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.close()


def each_in_a_thread(group: Group, run) -> None:  # type: ignore[no-untyped-def]
    failures: list[BaseException] = []

    def contained(rank: int) -> None:
        try:
            run(rank, group.ends[rank])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=contained, args=(rank,)) for rank in range(len(group.ends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert not failures, failures


def test_all_get_the_most_rows_of_each_step(three: Group) -> None:
    rows = [[random.Random(step * 3 + rank).randrange(100) for rank in range(3)] for step in range(200)]

    def run(rank: int, end: StepAgreement) -> None:
        for of_step in rows:
            assert end.agree(of_step[rank]) == max(of_step)

    each_in_a_thread(three, run)


def test_who_is_idle_is_woken_and_goes_along(three: Group) -> None:
    """Each in turn has ten steps of its own; whoever has none takes part with one row, until all have left."""
    seen: list[list[int]] = [[], [], []]

    def run(rank: int, end: StepAgreement) -> None:
        woken = threading.Event()
        end.wake_by(woken.set)
        left = 10
        while left or not end.leave():
            if left and (rank == 0 or end.is_behind or rank == len(seen[rank]) % 3):
                seen[rank].append(end.agree(100 + rank))
                left -= 1
            elif end.is_behind:
                seen[rank].append(end.agree(1))
            else:
                woken.wait(0.05)
                woken.clear()

    each_in_a_thread(three, run)
    assert seen[0] == seen[1] == seen[2]
    assert three.lost == [[], [], []]


def test_one_that_does_not_come_is_named() -> None:
    group = Group(2, stuck_s=0.05)
    try:
        with pytest.raises(TimeoutError, match=r"nodes \[1\].*step 1"):
            group.ends[0].agree(3)
    finally:
        group.close()


def test_an_end_is_told_unless_nobody_needs_steps() -> None:
    """That of one whose time to drain is over is told to those that have work, though it has said that it has none."""
    group = Group(3)
    try:
        assert not group.ends[2].leave()
        assert not group.ends[1].leave()
        wait_until(lambda: len(group.ends[0]._gone) == 2)
        wait_until(lambda: 2 in group.ends[1]._gone)
        group.ends[2].close()
        wait_until(lambda: bool(group.lost[0]))
        assert group.lost == [["node 2 of the group ended"], [], []]
        group.ends[0].leave()
        group.ends[1].close()
        group.ends[0].close()
        assert group.lost == [["node 2 of the group ended"], [], []]
    finally:
        group.close()


def test_one_is_closed_before_its_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    may_begin, failures = threading.Event(), list[BaseException]()

    def late_thread(run: Callable[[], object], name: str) -> threading.Thread:
        def late() -> None:
            may_begin.wait(PATIENCE_S)
            run()

        return watched_thread(late, name, on_failure=failures.append)

    monkeypatch.setattr(step_agreement, "watched_thread", late_thread)
    near, far = socket.socketpair()
    lost: list[str] = []
    end = StepAgreement({1: near}, lost.append)
    closing = threading.Thread(target=end.close)
    closing.start()
    wait_until(lambda: near.fileno() == -1)
    may_begin.set()
    closing.join(PATIENCE_S)
    far.close()
    assert not closing.is_alive()
    assert not failures
    assert not lost


def test_nobody_leaves_a_step_that_another_has_begun() -> None:
    group = Group(2)
    try:
        one, other = group.ends
        thread = threading.Thread(target=one.agree, args=(7,))
        thread.start()
        wait_until(lambda: other.is_behind)
        assert not other.leave()
        assert other.agree(1) == 7
        thread.join(PATIENCE_S)
        one.leave()
        wait_until(other.leave)
    finally:
        group.close()
