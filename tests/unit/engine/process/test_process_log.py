"""Lines that would repeat without end."""

from __future__ import annotations

import logging

import pytest

from tandem.engine.process import process_log
from tandem.engine.process.process_log import RateLimited, RateLimitFilter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def logger() -> logging.Logger:
    return logging.getLogger("tandem.test_process_log")


def test_a_line_is_said_once_then_with_how_many_were_left_out(caplog, clock, logger):
    limited = RateLimited(logger, 30, clock)
    for number in range(5):
        limited.warning("block %d can't be written", number)
    assert caplog.messages == ["block 0 can't be written"]
    clock.now = 30
    limited.warning("block %d can't be written", 5)
    assert caplog.messages[1:] == ["block 5 can't be written (4 more like it since the last such line)"]
    clock.now = 61
    limited.warning("block %d can't be written", 6)
    assert caplog.messages[2:] == ["block 6 can't be written"]


def test_what_goes_wrong_again_after_it_was_well_is_said_at_once(caplog, clock, logger):
    limited = RateLimited(logger, 30, clock)
    for _ in range(2):
        limited.warning("no Redis")
    limited.over()
    limited.warning("no Redis")
    assert caplog.messages == ["no Redis", "no Redis"]


def test_lines_of_another_key_are_others(caplog, clock, logger):
    limited = RateLimited(logger, 30, clock)
    for node in ("a", "b", "a"):
        limited.error("node %s refuses", node, key=node)
    assert caplog.messages == ["node a refuses", "node b refuses"]


def test_an_exception_brings_its_traceback(caplog, clock, logger):
    limited = RateLimited(logger, 30, clock)
    try:
        raise ValueError("why")
    except ValueError:
        limited.exception("it failed")
    assert "ValueError: why" in caplog.text


def test_keys_without_end_take_no_memory_without_end(caplog, clock, logger, monkeypatch):
    monkeypatch.setattr(process_log, "MAX_KINDS", 10)
    limited = RateLimited(logger, 30, clock)
    for number in range(100):
        limited.warning("x", key=number)
    assert len(limited._gate._kinds) == 10


def test_a_librarys_lines_are_held_back(caplog, clock, logger):
    limit = RateLimitFilter(30, clock)
    logger.addFilter(limit)
    try:
        for _ in range(3):
            logger.warning("Invalid HTTP request received.")
        clock.now = 31
        logger.warning("Invalid HTTP request received.")
    finally:
        logger.removeFilter(limit)
    assert len(caplog.messages) == 2
    assert "2 more" in caplog.messages[1]
