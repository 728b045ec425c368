"""The suite again and again, several side by side, each beside busy loops: is it green every time?"""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import psutil
from table import print_table

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Ends with whoever started it, however that ended.
LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10000))"
LOOK_S = 1.0
LONGEST_TEXT, TEXTS_A_NAME = 20_000, 3  # of failures.txt


@dataclass
class SteadyPlan:
    folder: Path
    times: int
    at_once: int
    workers: int  # test processes of a suite; 0: it has one alone
    loops: int  # busy loops beside a suite
    seconds_limit: float
    grace_s: float = 20.0  # in which an interrupted suite may end what its tests started
    arguments: tuple[str, ...] = ()  # for pytest: which tests, most often


@dataclass
class Account:
    """What a suite's journal says."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)  # text by name
    code: int | None = None  # pytest's, once it has ended by itself
    cpu_s: float = 0.0

    @classmethod
    def read(cls, journal: Path) -> Account:
        account = cls()
        for line in journal.read_text().splitlines() if journal.exists() else []:
            try:
                told = json.loads(line)
            except json.JSONDecodeError:  # killed while it wrote
                continue
            if "code" in told:
                account.code, account.cpu_s = told["code"], told["cpu_s"]
                continue
            account.counts[told["outcome"]] += told["outcome"] != "failed"
            if told["outcome"] == "failed":
                account.failures.setdefault(told["name"], told["text"])
        return account


class Suite:
    """One run of the suite with its own home, temporary folder and caches, and the busy loops beside it."""

    def __init__(self, number: int, plan: SteadyPlan) -> None:
        self.number, self.account, self.seconds, self.interrupted = number, Account(), 0.0, False
        self._begin = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="s"))  # short: a socket's path has 107 bytes at most
        self._journal = self._folder / "journal"
        for name in ("home", "t"):
            (self._folder / name).mkdir()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUSERBASE": site.getuserbase(),  # packages of the true home
            "HOME": str(self._folder / "home"),
            "TMPDIR": str(self._folder / "t"),
            "HYPOTHESIS_STORAGE_DIRECTORY": str(self._folder / "examples"),
        }
        how = ("-c", str(ROOT / "pyproject.toml"), f"--basetemp={self._folder / 'b'}", "-p", "no:cacheprovider")
        how = (*how, "-q", "-m", "not slow", "-n", str(plan.workers), "--dist", "loadfile", "--no-loadscope-reorder")
        command = [sys.executable, str(HERE / "one_suite.py"), str(self._journal), *how, *plan.arguments]
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self._loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(plan.loops)]

    def look(self) -> bool:
        """Reads the journal; whether the suite runs."""
        runs = self._process.poll() is None
        self.seconds = time.monotonic() - self._begin
        self.account = Account.read(self._journal)
        return runs

    def interrupt(self) -> None:
        self.interrupted = True
        self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Ends what is left of it. What it said is kept where it did not come to an end by itself."""
        left = [psutil.Process(self._process.pid)] if self._process.poll() is None else []
        for process in [each for parent in left for each in (*parent.children(recursive=True), parent)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        for loop in self._loops:
            loop.kill()
            loop.wait()
        self._process.wait()
        self.look()
        if self.account.code is None and not self.interrupted:
            said = (self._folder / "log").read_text(errors="replace")
            self.account.failures["the run itself"] = f"exit code {self._process.returncode}\n{said[-LONGEST_TEXT:]}"
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def end(self) -> str:
        if self.interrupted or self.account.code is None:
            return "unfinished"
        return "green" if self.account.code == 0 else "red"

    def row(self) -> list[object]:
        counts, failed = self.account.counts, len(self.account.failures)
        times = (f"{self.seconds:.0f} s", f"{self.account.cpu_s:.0f} s" if self.account.cpu_s else "")
        return [self.number, self.end, counts["passed"], failed, counts["skipped"], *times]


def run_steady(plan: SteadyPlan) -> int:
    """0 if every run was green. After the limit, or when this is told to end, suites are interrupted."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + plan.seconds_limit - plan.grace_s
    begun: list[Suite] = []
    running: list[Suite] = []
    try:
        while (running or len(begun) < plan.times) and time.monotonic() < end:
            while len(running) < plan.at_once and len(begun) < plan.times:
                running.append(Suite(len(begun) + 1, plan))
                begun.append(running[-1])
            time.sleep(LOOK_S)
            for suite in [each for each in running if not each.look()]:
                running.remove(suite)
                suite.close()
            write_down(plan, begun)
    finally:
        _end(running, plan.grace_s)
        write_down(plan, begun)
        print((plan.folder / "summary.md").read_text())
    return 0 if len(begun) == plan.times and all(suite.end == "green" for suite in begun) else 1


def _end(running: list[Suite], grace_s: float) -> None:
    for suite in running:
        suite.interrupt()
    end = time.monotonic() + grace_s / 2
    while any(suite.look() for suite in running) and time.monotonic() < end:
        time.sleep(0.1)
    for suite in running:
        suite.close()


def write_down(plan: SteadyPlan, suites: list[Suite]) -> None:
    """Two files in the folder, anew: also what kills this process leaves what was known."""
    by_name: dict[str, list[tuple[int, str]]] = {}
    for suite in suites:
        for name, text in suite.account.failures.items():
            by_name.setdefault(name, []).append((suite.number, text))
    with (plan.folder / "summary.md").open("w") as file:
        write_summary(plan, suites, by_name, file)
    with (plan.folder / "failures.txt").open("w") as file:
        for name, times in by_name.items():
            for number, text in times[:TEXTS_A_NAME]:
                file.write(f"==== {name}, run {number}\n{text[-LONGEST_TEXT:]}\n\n")


def write_summary(
    plan: SteadyPlan, suites: list[Suite], by_name: dict[str, list[tuple[int, str]]], file: TextIO
) -> None:
    print_table(("run", "end", "passed", "failed", "skipped", "took", "CPU"), (s.row() for s in suites), file)
    if by_name:
        rows = [[name, ", ".join(str(number) for number, _ in times)] for name, times in sorted(by_name.items())]
        print_table(("failed", "in runs"), rows, file)
    ends = Counter(suite.end for suite in suites)
    counted = ", ".join(f"{ends[end]} {end}" for end in ("green", "red", "unfinished"))
    beside = f"{plan.at_once} at once, {plan.workers} workers and {plan.loops} busy loops each"
    print(f"{counted}, {plan.times - len(suites)} not begun of {plan.times} runs: {beside}", file=file)
