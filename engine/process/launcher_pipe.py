"""What a process tells whoever started it: lines of JSON down an inherited pipe, which nobody else can write to."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from tandem.engine.contracts.errors import ConfigError


class LauncherPipe:
    """The writing end, `fd`; -1: nobody listens. Never blocks and never raises: a reader that stands still or is gone
    costs lines, and each line is short enough to be written as a whole.

    {"doing": "loading weights 25%"}   before it serves
    {"address": …} or {"port": …}      once, when the process serves, and what else there is to say of it
    {"beat": 1}                        from then on with each heartbeat
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_ready = False
        if fd >= 0:
            try:
                os.set_blocking(fd, False)
                os.set_inheritable(fd, False)
            except OSError:
                raise ConfigError(f"--ready-fd {fd} is no file descriptor that this process was given") from None

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    def loaded(self, fraction: float) -> None:
        self.doing(f"loading weights {fraction:.0%}")

    def doing(self, what: str) -> None:
        self._write({"doing": what})

    def ready(self, **said: Any) -> None:
        self._write(said)
        self._is_ready = True

    def beat(self) -> None:
        if self._is_ready:
            self._write({"beat": 1})

    def _write(self, line: dict[str, Any]) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self._fd, json.dumps(line).encode() + b"\n")
