"""The processes of a cluster by name, what they hold, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

MARK = "SOAK_CAMPAIGN"  # environment variable that every process of a campaign's clusters inherits
NODE_ID = "--node-id="


def named_processes(launcher_pid: int) -> dict[str, psutil.Process]:
    """prefill-0, decode-1, unified-0, router, router-worker-0 …, redis, launcher."""
    found: dict[str, psutil.Process] = {}
    workers: list[psutil.Process] = []
    try:
        launcher = psutil.Process(launcher_pid)
        children = launcher.children(recursive=True)
    except psutil.NoSuchProcess:
        return {}
    found["launcher"] = launcher
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            command = child.cmdline()
            if any(part.startswith(NODE_ID) for part in command):
                (node_id,) = (part.removeprefix(NODE_ID) for part in command if part.startswith(NODE_ID))
                found[node_id.rpartition("-")[0]] = child
            elif "router" in command:
                found["router"] = child
            elif any("spawn_main" in part for part in command):
                workers.append(child)
            elif command and "redis-server" in command[0]:
                found["redis"] = child
    for index, worker in enumerate(sorted(workers, key=lambda each: each.pid)):
        found[f"router-worker-{index}"] = worker
    return found


def levels(processes: dict[str, psutil.Process]) -> dict[str, tuple[int, int]]:
    """(file descriptors, threads) of each process."""
    measured = {}
    for name, process in processes.items():
        with contextlib.suppress(psutil.Error):
            measured[name] = (process.num_fds(), process.num_threads())
    return measured


def shared_segments(processes: dict[str, psutil.Process]) -> set[str]:
    """Files in /dev/shm that these processes map or hold open."""
    found = set()
    for process in processes.values():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                found |= {"/dev/shm/" + part.split()[0] for part in line.split("/dev/shm/")[1:]}
        with contextlib.suppress(OSError):
            held = [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            found |= {path.split()[0] for path in held if path.startswith("/dev/shm/")}
    return found


def marked(mark: str) -> Iterator[psutil.Process]:
    """Processes that live with this mark in their environment."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process


def wait_for_none(mark: str, timeout_s: float) -> list[str]:
    """What still runs after that time; it is killed."""
    deadline = time.monotonic() + timeout_s
    while (left := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[:200])
            process.kill()
    return names
