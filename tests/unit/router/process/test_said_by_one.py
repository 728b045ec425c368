"""Worker processes of a router write a line once that all of them would write."""

from __future__ import annotations

import logging
from pathlib import Path

from tandem.router.process.said_by_one import HOLD_S, SaidByOne


def record(text: str, **extra: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"msg": text, "levelno": logging.WARNING})
    vars(made).update(extra)
    return made


def test_what_all_find_is_said_by_the_first_and_again_later(tmp_path: Path) -> None:
    now = [100.0]
    workers = [SaidByOne(tmp_path, index, lambda: now[0]) for index in range(8)]
    assert [each.filter(record("no Redis")) for each in workers] == [True] + 7 * [False]
    assert workers[0].filter(record("no Redis")), "what a process repeats is not held back here"
    assert workers[3].filter(record("something else"))
    now[0] += HOLD_S
    assert [each.filter(record("no Redis")) for each in workers[5:]] == [True, False, False]


def test_lines_about_a_request_and_a_folder_that_is_gone(tmp_path: Path) -> None:
    workers = [SaidByOne(tmp_path, 0), SaidByOne(tmp_path, 1)]
    assert all(each.filter(record("asked", fields={"id": "a"})) for each in workers)
    workers = [SaidByOne(tmp_path / "gone", 0), SaidByOne(tmp_path / "gone", 1)]
    assert all(each.filter(record("no Redis")) for each in workers)
