"""A child of the launcher on a host of a Ray cluster: an actor there has the process, the launcher an object like a
process of its own. Ray decides where it runs and nothing else; what died is started again by our supervisor."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.deploy.launch.child_process import KEPT_LINES, ChildProcess, die_with_parent


class ProcessNews(NamedTuple):
    """What happened to a process since it was last asked for."""

    said: list[dict[str, Any]]
    lines: list[str]
    exit_code: int | None  # as `ChildProcess.exit_code` has it


class RemoteParent:
    """A Ray actor that is the parent of one process, which dies with it. It runs by the Python of its own host, and
    listens at the address by which Ray's other hosts know that one."""

    def __init__(self, name: str, command: Sequence[str], arguments: Sequence[str], environment: Mapping[str, str]):
        import ray.util

        die_with_parent()  # with the raylet: by itself an actor may outlive one that was killed
        self._lines: list[str] = []
        self._address = ray.util.get_node_ip_address()
        own = [*arguments, f"--host={self._address}"]
        command = [sys.executable, *command[1:]]
        self._child = ChildProcess(name, command, own, environment, lambda _, line: self._lines.append(line))

    def report(self) -> ProcessNews:
        self._child.forward_output()
        code = self._child.exit_code()
        said = [{**line, "host": self._address} if "port" in line else line for line in self._child.said()]
        if code is not None:
            self._child.close()
        lines, self._lines = self._lines, []
        return ProcessNews(said, lines, code)

    def terminate(self) -> None:
        self._child.terminate()


class RayChild:
    """A child whose process an actor runs. An actor that is lost counts as killed, and so does one that the launcher
    kills: Ray may take long to find out that its host is gone."""

    def __init__(self, name: str, actor: Any, write: Callable[[str, str], None]) -> None:
        self._name, self._actor, self._write = name, actor, write
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._said: list[dict[str, Any]] = [{"doing": "waiting for Ray to place it"}]
        self._exit_code: int | None = None
        self._asked: Any = None

    def exit_code(self) -> int | None:
        return self._exit_code

    def open_fds(self) -> list[int]:
        return []

    def said(self) -> list[dict[str, Any]]:
        said, self._said = self._said, []
        return said

    def forward_output(self) -> None:
        """Takes a report, if one has come, and asks for the next."""
        import ray

        if self._exit_code is not None:
            return
        try:
            if self._asked is None:
                self._asked = self._actor.report.remote()
            done, _ = ray.wait([self._asked], timeout=0)
            if not done:
                return
            report: ProcessNews = ray.get(self._asked)
        except ray.exceptions.RayError as error:
            self._lines.append(f"Ray lost it: {str(error).strip().splitlines()[0]}")
            self._write(self._name, self._lines[-1])
            self._exit_code = -signal.SIGKILL
            return
        self._asked = None
        self._said += report.said
        self._exit_code = report.exit_code
        for line in report.lines:
            self._lines.append(line)
            self._write(self._name, line)

    def last_words(self) -> str:
        return "\n".join(self._lines)

    def terminate(self) -> None:
        self._actor.terminate.remote()

    def kill(self) -> None:
        self.close()
        self._exit_code = -signal.SIGKILL

    def close(self) -> None:
        """Ends the actor, and the process with it."""
        import ray

        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actor)
