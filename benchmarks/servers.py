"""What benchmarks do with servers that they start: wait until they serve, read their nodes' counters, end them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from urllib.request import urlopen

from tandem.deploy.sse_client import HttpError, get_json

READY_S, STOP_S = 240.0, 20.0


async def until_ready(process: subprocess.Popen[bytes], url: str) -> int:
    """The model's length. Raises SystemExit when the process ends or takes too long."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}; start it by hand to see why")
        with contextlib.suppress(OSError, HttpError, EOFError):
            await get_json(url, "/ready")
            return int((await get_json(url, "/v1/models"))["data"][0]["max_model_len"])
        await asyncio.sleep(0.2)
    raise SystemExit(f"the server was not ready after {READY_S:.0f} s")


def node_counters(url: str) -> dict[str, float]:
    """Of all nodes together, by name."""
    text = urlopen(f"{url}/metrics", timeout=5).read().decode()
    totals: dict[str, float] = {}
    for name, value in re.findall(r'^tandem_node_counter{counter="(\w+)".*} (.+)$', text, re.MULTILINE):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """All at once; whoever does not drain in time is killed."""
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        process.kill()
