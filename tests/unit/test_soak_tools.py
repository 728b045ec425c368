"""What campaigns judge by: a difference is seen, a relay does what it is told, growth is told from noise."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from asks import difference
from memory import Sample, judge
from relay import Relay, Rule
from shared_parts import Part, Traces
from table import campaign_rows
from waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
ANSWER = {0: {"text": "a b", "token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5, -1.0]}}}


def changed(**fields: object) -> dict[int, dict]:
    return {0: {**ANSWER[0], **fields}}


@pytest.mark.parametrize(
    "got",
    [
        {},
        {**ANSWER, 1: ANSWER[0]},
        changed(text="a c"),
        changed(token_ids=[1]),
        changed(token_ids=[1, 3]),
        changed(logprobs={"token_logprobs": [-0.5, -1.003]}),
        changed(logprobs=None),
        changed(finish_reason="stop"),
    ],
)
def test_every_difference_is_seen(got: dict[int, dict]) -> None:
    assert difference(ANSWER, got)


def test_rounding_is_no_difference() -> None:
    assert difference(ANSWER, changed(logprobs={"token_logprobs": [-0.5009, -1.0]})) == ""
    assert difference({"rank": 169}, {"rank": 170}) == ""
    assert difference({"rank": 1}, {"rank": 2})


# --- relay ----------------------------------------------------------------------------------------------------


class Wire:
    """A client of ours that has connected to a server of ours, called redis, through a relay."""

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.relay = Relay(lambda: {"router": psutil.Process(os.getpid())})
        self.port = self.relay.relay_redis(self.server.getsockname()[1])
        self.near, self.far = self.connect()

    def connect(self) -> tuple[socket.socket, socket.socket]:
        near = socket.create_connection(("127.0.0.1", self.port), PATIENCE_S)
        self.server.settimeout(PATIENCE_S)
        far, _ = self.server.accept()
        far.settimeout(PATIENCE_S)
        near.sendall(b"hello")
        assert far.recv(5, socket.MSG_WAITALL) == b"hello"
        far.sendall(b"welcome")
        assert near.recv(7, socket.MSG_WAITALL) == b"welcome"
        return near, far

    def apply(self, fault: str, one: str = "router") -> None:
        self.relay.apply(Rule(fault, one, "redis", "redis", delay_s=0.01))

    def close(self) -> None:
        self.relay.close()
        for each in (self.near, self.far, self.server):
            each.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def is_silent(sock: socket.socket) -> bool:
    sock.settimeout(0.3)
    with pytest.raises(TimeoutError):
        sock.recv(1)
    sock.settimeout(PATIENCE_S)
    return True


def ends(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def is_refused(port: int) -> bool:
    """Whether a new connection ends, be it while it is made: what breaks it may be faster than who makes it."""
    try:
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as sock:
            return ends(sock)
    except ConnectionResetError:
        return True


def test_what_is_stalled_comes_later(wire: Wire) -> None:
    wire.apply("stall")
    wire.near.sendall(b"later")
    assert is_silent(wire.far)
    wire.relay.apply()
    assert wire.far.recv(5, socket.MSG_WAITALL) == b"later"


def test_what_is_dropped_is_lost_and_the_connection_with_it(wire: Wire) -> None:
    wire.apply("drop")
    wire.near.sendall(b"never")
    assert is_silent(wire.far)
    wire.relay.apply()
    assert ends(wire.far)
    assert ends(wire.near)


def test_what_is_delayed_comes_whole(wire: Wire) -> None:
    wire.apply("delay")
    wire.near.sendall(bytes(1 << 20))
    received = 0
    while received < 1 << 20:
        received += len(wire.far.recv(1 << 16))


def test_connections_are_reset_until_the_rule_ends(wire: Wire) -> None:
    wire.apply("reset")
    assert ends(wire.near)
    assert ends(wire.far)
    assert is_refused(wire.port)
    wire.relay.apply()
    while True:  # what was refused meanwhile stands in the queue before it
        far, _ = wire.server.accept()
        with far:
            if ends(far):
                break
    for each in wire.connect():
        each.close()


def test_a_half_closed_connection_still_speaks_the_other_way(wire: Wire) -> None:
    wire.apply("half-close")
    assert ends(wire.far)
    wire.far.sendall(b"still")
    assert wire.near.recv(5, socket.MSG_WAITALL) == b"still"


def test_a_rule_between_others_changes_nothing(wire: Wire) -> None:
    wire.apply("stall", one="decode-1")
    wire.near.sendall(b"now")
    assert wire.far.recv(3, socket.MSG_WAITALL) == b"now"


# --- verdicts -------------------------------------------------------------------------------------------------


def series(rss: list[int]) -> list[Sample]:
    return [Sample(3.0 * i, "prefill-0", (value, value, 20, 8)) for i, value in enumerate(rss)]


@pytest.mark.parametrize(
    ("rss", "verdict"),
    [
        ([(400 << 20) + i * (1 << 20) for i in range(90)], "growth"),
        ([(400 << 20) + min(i, 30) * (5 << 20) for i in range(90)], "plateau"),
        ([(400 << 20) + (i % 2) * (20 << 20) for i in range(90)], "plateau"),
    ],
)
def test_growth_is_told_from_a_start_and_from_noise(rss: list[int], verdict: str) -> None:
    verdicts = {each["what"]: each["verdict"] for each in judge(series(rss))}
    assert verdicts == {"rss": verdict, "pss": verdict, "fds": "plateau", "threads": "plateau"}


def test_campaigns_are_added_up() -> None:
    one = {
        "seed": 1, "transport": "tcp", "nodes": "1+2", "kinds": "kill,redis", "moments": 2, "requests": 9,
        "struck": {"SIGKILL decode": 2}, "ends": {"equal": 6, "503": 1, "connection": 2, "refused": 3},
        "slowest_s": 2.5, "failures": [],
    }  # fmt: skip
    other = {**one, "seed": 2, "failures": ["wrong"], "slowest_s": 1.0}
    (row,) = campaign_rows([one, other])
    assert list(row) == ["tcp", "1+2", "kill, redis", "1–2", "4", "18", "12", 0, "2", "4", "6", 0, 0, "2.5 s", 1]


# --- who is in the middle of a prompt -------------------------------------------------------------------------


def test_a_helper_is_found_by_the_layers_that_come_to_it_from_now_on(tmp_path: Path) -> None:
    def tell(node: str, stage: str, request: str = "cmpl-1/unified-0-a/3/0/1", end: str = "\n") -> None:
        with (tmp_path / f"{node}.jsonl").open("a") as file:
            file.write(json.dumps({"t": 1.0, "node": node, "request": request, "stage": stage}) + end)

    tell("unified-1-b", "received KVLayers")  # over
    traces = Traces(tmp_path)
    tell("unified-0-a", "received KVLayers")  # from who helps it
    tell("unified-1-b", "received KVPull")
    tell("unified-1-b", "step", request="")
    assert traces.wait(0.05) is None
    tell("unified-2-c", "sent KVLayers", end="")
    assert traces.wait(0.05) is None, "the rest of the line follows"
    with (tmp_path / "unified-2-c.jsonl").open("a") as file:
        file.write("\n")
    assert traces.wait(PATIENCE_S) == Part("unified-2-c", "unified-0-a")


# --- the suite again and again --------------------------------------------------------------------------------

TESTS = """
import os, time

def test_passes(tmp_path):
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert os.environ["HOME"] != {home!r}
    assert str(tmp_path).startswith(os.path.dirname(os.environ["HOME"]))

def test_fails():
    assert 1 == 2, "a reason"

def test_hangs_the_second_time():
    try:
        os.mkdir({mark!r})
    except FileExistsError:
        os.mkdir({mark!r} + "-hangs")
        time.sleep(600)
"""


@pytest.mark.slow
def test_failures_are_told_by_name_also_of_a_run_that_is_cut_short(tmp_path: Path) -> None:
    tests, out, mark = tmp_path / "test_few.py", tmp_path / "out", tmp_path / "begun"
    tests.write_text(TESTS.format(home=os.environ.get("HOME", ""), mark=str(mark)))
    command = [sys.executable, "tests/soak", "steady", "--times", "3", "--workers", "0", "--loops", "1"]
    told = subprocess.Popen(
        [*command, "--folder", str(out), "--arguments", str(tests)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    wait_until(Path(f"{mark}-hangs").exists, "the second run hangs")
    suite, loop = psutil.Process(told.pid).children()
    told.terminate()
    summary, _ = told.communicate(timeout=PATIENCE_S)
    assert not suite.is_running()
    assert not loop.is_running()
    assert told.returncode == 1
    assert summary.startswith((out / "summary.md").read_text())
    assert "| 1 | red | 2 | 1 |" in summary
    assert "| 2 | unfinished | 1 | 1 |" in summary
    assert re.search(r"test_fails \| 1, 2 \|", summary)
    assert "0 green, 1 red, 1 unfinished, 1 not begun of 3 runs" in summary
    assert (out / "failures.txt").read_text().count("AssertionError: a reason") == 2
