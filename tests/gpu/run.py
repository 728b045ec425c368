"""The whole GPU suite, in parallel processes, and the record of its last run on each kind of machine in RESULTS.md.

    python tests/gpu/run.py               all tests (`make test-gpu`)
    python tests/gpu/run.py --several     those alone that use several GPUs, as many as there are

Further arguments go to pytest, and the record names them: `-k WORD`, or files of this folder, which are run in its
place. Tests of kernels and those of nodes run at the same time, each process on another of the GPUs first; those marked
`alone` measure the GPU's memory and come last, one after the other. GPU_SUITE_COMMIT names the commit where there is no
history, GPU_SUITE_S how many seconds each of the two parts may take.
"""

from __future__ import annotations

import datetime
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RESULTS = HERE / "RESULTS.md"
TITLE = """# The GPU suite's last runs

Written by `make test-gpu`: one section for each kind of machine and list of tests, the newest first. A change of what
runs on GPUs after the commit named here has not been shown to work.
"""
# Processes on one GPU, 9 and 6 on 16 cores: each keeps a context of some 0.5 GB, and compiles kernels most of the time.
# Guesses.
CORES = os.cpu_count() or 16
KERNEL_WORKERS, NODE_WORKERS = CORES // 2 + 1, CORES // 4 + 2
THREADS = "2"  # of a process: references are computed on the CPU, beside the compilers of kernels
LIMIT_S = float(os.environ.get("GPU_SUITE_S", "900"))  # what hangs is recorded as such
TEST_LIMIT_S = "240"
PACKAGES = ("torch", "triton", "transformers")


@dataclass
class Outcome:
    """Counts and the names of what failed, over all phases of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    def add(self, report: Path) -> None:
        """Adds what pytest's JUnit report tells. A test that ended its process is in it twice, and counts once."""
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            if case.get("name") is None:  # of a test that was interrupted
                continue
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            self.slowest.append((float(case.get("time", "0")), name))
            fault = case.find("failure") if case.find("failure") is not None else case.find("error")
            skip = case.find("skipped")
            if fault is not None:
                if name not in {known.partition(" — ")[0] for known in self.failed}:
                    first = (fault.get("message") or "").strip().partition("\n")[0]
                    self.failed.append(f"{name} — {first[:160]}")
            elif skip is not None:
                self.counts["skipped"] += 1
                self.skipped[(skip.get("message") or "").partition("\n")[0]] += 1
            else:
                self.counts["passed"] += 1

    @property
    def line(self) -> str:
        return f"{self.counts['passed']} passed, {len(self.failed)} failed, {self.counts['skipped']} skipped"


@dataclass
class Phase:
    """One run of pytest over the tests with these marks."""

    marks: str
    how: tuple[str, ...]
    is_interrupted: bool = False

    def start(self, folder: Path, arguments: list[str]) -> None:
        """A test that hangs in a call of CUDA takes its process along."""
        pytest = shutil.which("pytest", path=Path(sys.executable).parent) or shutil.which("pytest")
        if pytest is None:
            raise FileNotFoundError("no pytest: install the project with its extra `test`")
        self.report = folder / f"{self.marks.replace(' ', '_')}.xml"
        limits = ("--timeout", TEST_LIMIT_S, "--timeout-method", "thread", f"--junitxml={self.report}")
        places = [] if any(map(is_place, arguments)) else [str(HERE)]
        self._process = subprocess.Popen(
            [pytest, *places, "-v", "-m", self.marks, *self.how, *limits, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": THREADS},
        )

    def ends_until(self, end: float) -> bool:
        """Whether it ended in time; it is ended else, as where somebody interrupts the run, and tells what it knows."""
        try:
            self._process.wait(max(0.0, end - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as cause:
            self.is_interrupted = isinstance(cause, KeyboardInterrupt)
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
            return False
        return True


def main(arguments: list[str]) -> int:
    several = "--several" in arguments
    arguments = [argument for argument in arguments if argument != "--several"]
    devices = device_names()
    if not devices:
        print("no CUDA device: nothing was run", file=sys.stderr)
        return 2
    begin, outcome = time.monotonic(), Outcome()
    parts = [
        [
            Phase("gpu and not alone and not several_gpus", ("-n", str(KERNEL_WORKERS), "--dist", "worksteal")),
            Phase("several_gpus and not alone", ("-n", str(NODE_WORKERS), "--dist", "loadgroup")),
        ],
        [Phase("alone", ("-n", "0"))],
    ]
    if several:
        parts[0] = parts[0][1:]
    unfinished = []
    with tempfile.TemporaryDirectory() as folder:
        for phases in parts:
            if any(phase.is_interrupted for earlier in parts for phase in earlier):
                unfinished += [f"the tests marked `{phase.marks}` were not begun" for phase in phases]
                continue
            for phase in phases:
                phase.start(Path(folder), arguments)
            end = time.monotonic() + LIMIT_S
            for phase in phases:
                if not phase.ends_until(end):
                    why = "were interrupted" if phase.is_interrupted else f"did not end within {LIMIT_S:.0f} s"
                    unfinished.append(f"the tests marked `{phase.marks}` {why}")
                if phase.report.exists():
                    outcome.add(phase.report)
    outcome.failed += unfinished
    took = time.monotonic() - begin
    machine = f"{len(devices)} × {devices[0]}, {what_ran(arguments, several)}"
    write_section(machine, section(outcome, took))
    for seconds, name in sorted(outcome.slowest, reverse=True)[:15]:
        print(f"{seconds:7.1f} s {name}")
    print(*outcome.failed, f"{machine}: {outcome.line} in {took:.0f} s", sep="\n")
    return 1 if outcome.failed or not outcome.counts["passed"] else 0


def what_ran(arguments: list[str], several: bool) -> str:
    """The list of tests, as a title has it: all of them only where pytest got no arguments, which may select."""
    if not arguments:
        return "tests of several GPUs" if several else "all tests"
    call = " ".join(f"pytest {shlex.join(arguments)}".split())  # a title is one line
    return f"tests {'of several GPUs ' if several else ''}by `{call}`"


def is_place(argument: str) -> bool:
    """Whether it names some of the suite: a folder, a file or a test."""
    path = (ROOT / argument.partition("::")[0]).resolve()
    return path.is_relative_to(HERE.resolve()) and path.exists()


def device_names() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def commit() -> str:
    """The commit's hash, with a word when files differ from it."""
    if "GPU_SUITE_COMMIT" in os.environ:
        return os.environ["GPU_SUITE_COMMIT"]
    try:
        run = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip() + (" with changes" if status.stdout.strip() else "")


def section(outcome: Outcome, took: float) -> str:
    def installed(name: str) -> str:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return f"no {name}"

    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    python = ".".join(map(str, sys.version_info[:3]))
    lines = [
        f"- commit {commit()}, {today}",
        f"- {', '.join(map(installed, PACKAGES))}, Python {python}",
        f"- {outcome.line}, {took:.0f} s",
        *(f"- failed: {name}" for name in outcome.failed),
        *(f"- skipped {count}: {reason}" for reason, count in outcome.skipped.most_common()),
    ]
    return "\n".join(lines)


def write_section(machine: str, text: str) -> None:
    """Puts this machine's section first, in place of its last one."""
    before = RESULTS.read_text() if RESULTS.exists() else TITLE
    _, *sections = before.split("\n## ")
    others = [known.strip() for known in sections if known.partition("\n")[0] != machine]
    RESULTS.write_text("\n## ".join([TITLE, f"{machine}\n\n{text}\n", *(f"{known}\n" for known in others)]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
