"""How every process of Tandem writes its log: to standard error, a line with time and place for each record.

On a terminal lines are short and coloured, for machines they may be JSON (--log-format).
What may go wrong again and again is said through RateLimited, or, where a library says it, behind a RateLimitFilter.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from typing import TextIO

from tandem.engine.contracts.config import LogFormat, LogLevel

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
COLOURS = {"DEBUG": 2, "INFO": 32, "WARNING": 33, "ERROR": 31, "CRITICAL": 35}  # of a terminal: dim, green, yellow, …
REPEAT_S = 30.0  # between two lines of one kind; a guess: often enough to be seen while the trouble lasts
MAX_KINDS = 1_000  # kinds of lines that are remembered; lines of forgotten kinds may come too often; a guess


class _Gate:
    """Decides which lines pass: the first of each key, then one every `repeat_s`. Safe to use from every thread."""

    def __init__(self, repeat_s: float, clock: Callable[[], float]) -> None:
        self._repeat_s, self._clock, self._lock = repeat_s, clock, threading.Lock()
        self._kinds: dict[Hashable, tuple[float, int]] = {}  # when it was said last, and how many were held back since

    def admit(self, key: Hashable) -> int | None:
        """How many lines of this key were held back since the last that passed; None: this one is held back, too."""
        now = self._clock()
        with self._lock:
            said_at, num_held = self._kinds.get(key, (-float("inf"), 0))
            if now - said_at < self._repeat_s:
                self._kinds[key] = said_at, num_held + 1
                return None
            self._kinds.pop(key, None)  # so that the dict stays in the order in which lines were said
            self._kinds[key] = now, 0
            if len(self._kinds) > MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            return num_held

    def forget(self) -> None:
        with self._lock:
            self._kinds.clear()


class RateLimited:
    """A logger for what may repeat without end. It writes one line of each kind every `repeat_s`, and how many were
    left out.

    Lines are of one kind when they have the same `key`, by default the text before its arguments are filled in.
    """

    def __init__(
        self, logger: logging.Logger, repeat_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._gate = logger, _Gate(repeat_s, clock)

    def warning(self, text: str, *args: object, key: Hashable = None) -> None:
        self._log(logging.WARNING, text, args, key, False)

    def error(self, text: str, *args: object, key: Hashable = None) -> None:
        self._log(logging.ERROR, text, args, key, False)

    def exception(self, text: str, *args: object, key: Hashable = None, request_id: str = "") -> None:
        """An error with the traceback of the exception that is being handled. `request_id`: whom it cost, for JSON."""
        self._log(logging.ERROR, text, args, key, True, request_id)

    def over(self) -> None:
        """Notes that the trouble is over: the next line is written at once, whatever its kind."""
        self._gate.forget()

    def _log(
        self,
        level: int,
        text: str,
        args: tuple[object, ...],
        key: Hashable,
        with_traceback: bool,
        request_id: str = "",
    ) -> None:
        num_held = self._gate.admit(text if key is None else key)
        if num_held is not None:
            about = {"about": {"id": request_id}} if request_id else None
            self._logger.log(level, text + _also(num_held), *args, exc_info=with_traceback, extra=about)


class RateLimitFilter(logging.Filter):
    """Does what `RateLimited` does for a library's logger: `logging.getLogger("…").addFilter(RateLimitFilter())`."""

    def __init__(self, repeat_s: float = REPEAT_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._gate = _Gate(repeat_s, clock)

    def filter(self, record: logging.LogRecord) -> bool:
        num_held = self._gate.admit((record.levelno, record.msg))
        if num_held:
            record.msg = f"{record.msg}{_also(num_held)}"
        return num_held is not None


class ShortFormatter(logging.Formatter):
    """Lines for people at a terminal: the time of day, the level by colour, where it is said, what."""

    def format(self, record: logging.LogRecord) -> str:
        colour, name = COLOURS.get(record.levelname, 0), record.name.removeprefix("tandem.")
        head = f"\x1b[2m{self.formatTime(record, '%H:%M:%S')}\x1b[0m \x1b[{colour}m{record.levelname:7}\x1b[0m"
        return f"{head} \x1b[2m{name}:\x1b[0m {super().format(record)}"


class JsonFormatter(logging.Formatter):
    """An object a line: time (UTC, ISO 8601), level, logger, message or fields, and the traceback of an exception."""

    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if fields := getattr(record, "fields", None):  # a line that is made of fields has them one by one
            said = {name: value for name, value in said.items() if name != "message"} | fields
        said |= getattr(record, "about", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


def chosen_format(wanted: LogFormat, stream: TextIO) -> LogFormat:
    """What auto is for `stream`: color on a terminal, unless NO_COLOR asks for none (no-color.org), else plain."""
    if wanted != "auto":
        return wanted
    return "color" if stream.isatty() and not os.environ.get("NO_COLOR") else "plain"


def start_log(level: LogLevel = "info", log_format: LogFormat = "auto") -> None:
    """Starts the log of this process, or changes its level or format. Libraries log from warnings on."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    kinds = {"plain": logging.Formatter(FORMAT), "color": ShortFormatter(), "json": JsonFormatter()}
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:  # not one that a test or a program around us has put there
            handler.setFormatter(kinds[chosen_format(log_format, sys.stderr)])
    logging.getLogger("tandem").setLevel(level.upper())


def _also(num_held: int) -> str:
    return f" ({num_held} more like it since the last such line)" if num_held else ""
