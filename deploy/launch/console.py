"""Standard error of the launcher: lines of its own and of its children, and how far their loading is."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from typing import TextIO

LINE_EVERY_S = 10.0  # a guess: how often a terminal is told that something still goes on
_ERASE = "\r\x1b[K"


class Console:
    """On a terminal the progress is the last line, drawn anew; elsewhere it is a line every `LINE_EVERY_S`.

    A terminal that is gone costs what would have been written there, nothing else.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._drawn = ""
        self._next_line: float | None = None

    def say(self, text: str) -> None:
        self.line(f"tandem: {text}")

    def line(self, text: str) -> None:
        self._write((_ERASE if self._drawn else "") + text + "\n" + self._drawn)

    def progress(self, loaded: Mapping[str, float], now: float) -> None:
        """`loaded`: how much of its weights each child has, of 1; empty when nobody loads."""
        parts = ", ".join(f"{name} {fraction:.0%}" for name, fraction in sorted(loaded.items()))
        text = f"loading weights: {parts}" if parts else ""
        if self._is_terminal:
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
