"""Which nodes are in the middle of a prompt that several compute, by the traces that nodes write
(`--handoff-trace`)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LOOK_EVERY_S = 0.01


class Part(NamedTuple):
    """A part of somebody's prompt that is being computed now. Both are node ids."""

    helper: str
    lead: str  # whose prompt it is


class Traces:
    """What the traces in a folder tell from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = {path: path.stat().st_size for path in folder.glob("*.jsonl")}

    def wait(self, timeout_s: float) -> Part | None:
        """The next part that layers come for or go from; None: there was none in that time."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            part = next(self._parts(), None)
            if part is not None:
                return part
            time.sleep(LOOK_EVERY_S)
        return None

    def _parts(self) -> Iterator[Part]:
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                for line in file:
                    if not line.endswith(b"\n"):  # the rest follows
                        break
                    self._read[path] = self._read.get(path, 0) + len(line)
                    part = part_of(line)
                    if part is not None:
                        yield part


def part_of(line: bytes) -> Part | None:
    """The part that a line of a trace is about: layers of it have come to its node, or gone from there."""
    told = json.loads(line)
    if not told["stage"].endswith("KVLayers"):
        return None
    lead = told["request"].split("/")[-4]  # …/lead/number/chunk/place: kv_connector/pulls/share.py
    return Part(told["node"], lead) if told["node"] != lead else None
