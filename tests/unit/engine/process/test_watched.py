"""Threads and tasks that nobody waits for: none ends unseen, and nothing in the product starts one unwatched."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S
from wings import WINGS

from tandem.engine.process import watched
from tandem.engine.process.watched import EXIT_FAULT, lasting_task, log_only, watched_task, watched_thread

ROOT = Path(__file__).resolve().parents[4]
STARTERS = {
    "Thread",
    "Timer",
    "start_new_thread",
    "ThreadPoolExecutor",
    "create_task",
    "ensure_future",
    "run_in_executor",
    "TaskGroup",
}
# Those that may, beside engine/process/watched.py itself, and why.
ALLOWED = {
    "engine/models/identity.py": "a pool whose results are all read on the spot",
    "deploy/bench/load.py": "a command for people: every task is gathered, and an exception ends the command",
    "llm/async_llm.py": "a future that its caller has, with whatever ends it",
    "llm/llm.py": "every task is gathered, and an exception is the caller's",
    "deploy/bench/trace_replay.py": "a command for people: every task is gathered, and an exception ends the command",
}
# Threads of nodes, whose processes end with any of them (`end_with_any_thread`).
OF_NODES = {
    "node/control/plane.py": "the thread of messages",
    "node/ranks/leader.py": "the watcher of ranks",
    "kv_connector/transports/mapped/processes.py": "the watcher of processes",
    "kv_connector/tiers/host_blocks.py": "touching a host tier's pages",
    "kv_connector/tiers/job_thread.py": "jobs of the tiers",
    "kv_connector/transfer/thread.py": "writes to peers",
    "kv_connector/transports/links/door.py": "accepting and greeting peers",
}


def starters(tree: ast.AST) -> Iterator[int]:
    """Lines that start a thread or task, or derive from one."""
    for node in ast.walk(tree):
        if (isinstance(node, ast.Call) and _name(node.func) in STARTERS) or (
            isinstance(node, ast.ClassDef) and any(_name(base) in STARTERS for base in node.bases)
        ):
            yield node.lineno


def _name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def files_that_start() -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for folder in WINGS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            if not any(name in source for name in STARTERS):
                continue  # parsing the whole product takes seconds
            lines = list(starters(ast.parse(source)))
            if lines:
                found[path.relative_to(ROOT).as_posix()] = lines
    return found


def test_every_thread_and_task_of_the_product_is_watched():
    found = files_that_start()
    del found["engine/process/watched.py"]
    new = {path: lines for path, lines in found.items() if path not in ALLOWED | OF_NODES}
    assert not new, f"start these through tandem.engine.process.watched: {new}"
    unused = sorted((ALLOWED | OF_NODES).keys() - found)
    assert not unused, f"take these out of the lists: {unused}"


@pytest.mark.parametrize(
    "code",
    [
        "threading.Thread(target=f)",
        "Thread(target=f)",
        "class Mine(threading.Thread): pass",
        "asyncio.create_task(f())",
        "loop.create_task(f())",
        "asyncio.ensure_future(f())",
        "loop.run_in_executor(None, f)",
        "threading.Timer(1, f)",
    ],
)
def test_the_rule_sees_every_way_to_start_one(code):
    assert list(starters(ast.parse(code))) == [1]


FAILING = """
import asyncio, sys, time
from tandem.engine.process.process_log import start_log
from tandem.engine.process.watched import watched_task, watched_thread
start_log()

def fail():
    raise KeyError("nobody expected this")

async def task():
    async def work():
        fail()
    watched_task(work(), "a task")
    await asyncio.sleep(60)

if sys.argv[1] == "thread":
    watched_thread(fail, "a thread").start()
    time.sleep(60)
asyncio.run(task())
"""


@pytest.mark.parametrize("kind", ["thread", "task"])
def test_an_unexpected_exception_ends_the_process(kind: str):
    ended = subprocess.run([sys.executable, "-c", FAILING, kind], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == EXIT_FAULT
    assert "KeyError: 'nobody expected this'" in ended.stderr


def test_a_thread_may_say_what_its_failure_costs():
    errors: list[BaseException] = []

    def divide(numerator: int, denominator: int) -> float:
        return numerator / denominator

    thread = watched_thread(divide, "t", 1, 0, on_failure=errors.append)
    thread.start()
    thread.join(PATIENCE_S)
    assert isinstance(errors[0], ZeroDivisionError)
    assert thread.daemon
    assert threading.current_thread() is not thread


async def test_a_task_that_ends_or_is_cancelled_has_not_failed():
    errors: list[BaseException] = []
    await watched_task(asyncio.sleep(0), "ends", errors.append)
    task = watched_task(asyncio.sleep(60), "is cancelled", errors.append)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not errors


async def test_a_failure_that_costs_nothing_is_logged(caplog):
    async def work() -> None:
        raise KeyError("why")

    await watched_task(work(), "odd", log_only)
    assert "KeyError: 'why'" in caplog.text


async def test_work_that_fails_or_ends_is_started_again(monkeypatch):
    monkeypatch.setattr(watched, "FIRST_PAUSE_S", 0.001)
    runs: list[int] = []
    done = asyncio.Event()

    async def work() -> None:
        runs.append(1)
        if len(runs) == 1:
            raise KeyError("the first")
        if len(runs) == 3:
            done.set()
            await asyncio.sleep(60)

    task = lasting_task(work, "work")
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(runs) == 3
