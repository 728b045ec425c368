"""Standard error of the launcher: lines of its own and of its children, and what they are still busy with."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from typing import TextIO

from tandem.deploy.launch.said_once import SaidOnce, without_time
from tandem.engine.contracts.config import LogFormat
from tandem.engine.process.process_log import chosen_format

LINE_EVERY_S = 10.0  # a guess: how often a log is told that something still goes on
_ERASE = "\r\x1b[K"


class Console:
    """On a terminal the progress is the last line, drawn anew; elsewhere it is a line every `LINE_EVERY_S`.

    A terminal that is gone costs what would have been written there, nothing else.
    """

    def __init__(self, stream: TextIO | None = None, log_format: LogFormat = "auto") -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._format = chosen_format(log_format, self._stream)
        self._said = SaidOnce()
        self._drawn = ""
        self._next_line: float | None = None

    def say(self, text: str) -> None:
        """Shows a line of the launcher's own."""
        self._line("tandem", text)

    def child_line(self, name: str, text: str, now: float) -> None:
        """Shows a line that a child has written, unless another has just said the same."""
        printed = self._format == "json" and not without_time(text)  # by a library: JSON's records are whole lines
        if printed or self._said.admit(name, text, now):
            self._line(name, text)

    def progress(self, busy: Mapping[str, str], now: float) -> None:
        """Shows what each child does before it serves, if any does. To be called often, with an empty `busy` too."""
        for text in self._said.due(now):
            self.say(text)
        text = "; ".join(f"{name}: {what}" for name, what in sorted(busy.items()))
        if self._is_terminal and self._format != "json":
            text = text[: shutil.get_terminal_size().columns - 1]
            if text != self._drawn:
                self._write(_ERASE + text)
                self._drawn = text
        elif not text:
            self._next_line = None
        elif self._next_line is None:
            self._next_line = now + LINE_EVERY_S
        elif now >= self._next_line:
            self._next_line = now + LINE_EVERY_S
            self.say(text)

    def _line(self, name: str, text: str) -> None:
        self._write((_ERASE if self._drawn else "") + self._marked(name, text) + "\n" + self._drawn)

    def _marked(self, name: str, text: str) -> str:
        if self._format == "json":
            return _as_json(name, text)
        mark = "tandem:" if name == "tandem" else f"[{name}]"
        return f"\x1b[36m{mark}\x1b[0m {text}" if self._format == "color" else f"{mark} {text}"

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            self._give_up()
        except ValueError:  # closed by ourselves
            pass

    def _give_up(self) -> None:
        """What is left in the stream's buffer goes nowhere, too: else its last flush, when the process ends, would fail
        and change the exit code."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def _as_json(name: str, text: str) -> str:
    """An object that names the process: the child's own, or one around a line that is none."""
    said = None
    with contextlib.suppress(ValueError):
        said = json.loads(text)
    if not isinstance(said, dict):
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        said = {"time": now, "level": "info", "logger": "tandem.deploy", "message": text}
    return json.dumps(said | {"process": name})
