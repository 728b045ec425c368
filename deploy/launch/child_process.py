"""One child process of the launcher: its pipes, its last words, its end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tandem.deploy.options import own_environment

KEPT_LINES = 20  # a guess: of a child's output, shown when it fails
_PR_SET_PDEATHSIG = 1
# Resolved here, so that the forked child calls it without taking a lock.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Has the kernel send SIGKILL when the *thread* that started this process ends. For `preexec_fn`, where there is
    one. No-op off Linux."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class RunningChild(Protocol):
    """What the launcher does with a child, wherever that runs. None of it blocks."""

    def exit_code(self) -> int | None: ...

    def open_fds(self) -> list[int]: ...

    def said(self) -> list[dict[str, Any]]: ...

    def forward_output(self) -> None: ...

    def last_words(self) -> str: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class ChildProcess:
    """Runs `command` plus `arguments` plus `--ready-fd N` in a session of its own; reads without blocking.

    `environment` adds to this process's own; `write` gets the child's name and each line of its output.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        write: Callable[[str, str], None],
    ) -> None:
        self.name = name
        self._write = write
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = {"output": b"", "said": b""}
        said_read, said_write = os.pipe()
        output_read, output_write = os.pipe()
        self._fds = {"output": output_read, "said": said_read}
        for fd in self._fds.values():
            os.set_blocking(fd, False)
        try:
            self._process = subprocess.Popen(
                [*command, *arguments, f"--ready-fd={said_write}"],
                stdin=subprocess.DEVNULL,
                stdout=output_write,
                stderr=output_write,
                pass_fds=[said_write],
                env=own_environment(os.environ) | dict(environment),
                preexec_fn=die_with_parent,
                start_new_session=True,
            )
        finally:
            os.close(said_write)
            os.close(output_write)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal. Its pid stays taken until `close`, which may still signal it."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def open_fds(self) -> list[int]:
        return list(self._fds.values())

    def said(self) -> list[dict[str, Any]]:
        """What the child said since the last call (engine/process/launcher_pipe.py); lines that can't be read are left
        out."""
        lines = []
        for line in self._read("said"):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return [line for line in lines if isinstance(line, dict)]

    def forward_output(self) -> None:
        """Passes complete lines on."""
        for line in self._read("output"):
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            self._write(self.name, text)

    def last_words(self) -> str:
        return "\n".join(self._lines)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kills the whole session, so that workers of a router end with it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends what is left of it and reads its last lines."""
        self.kill()
        self._process.wait()
        self.forward_output()
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def _read(self, pipe: str) -> list[bytes]:
        data = self._partial[pipe]
        with contextlib.suppress(BlockingIOError):
            while pipe in self._fds:
                chunk = os.read(self._fds[pipe], 65536)
                if not chunk:  # end of file would wake the poll for ever
                    os.close(self._fds.pop(pipe))
                data += chunk or (b"\n" if data else b"")
        *lines, self._partial[pipe] = data.split(b"\n")
        return lines
