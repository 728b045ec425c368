"""A server of one's own: `tandem serve` as a child process on a port of this machine that only its starter may ask."""

from __future__ import annotations

import os
import queue
import re
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

from tandem.deploy.command_line.flags import to_arguments, to_environment
from tandem.deploy.command_line.foreign_names import WITHOUT_COUNTERPART, translate
from tandem.deploy.command_line.option import did_you_mean
from tandem.deploy.launch.child_process import KEPT_LINES, die_with_parent
from tandem.deploy.options import SERVE_OPTIONS, own_environment
from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.process.watched import watched_thread

KILL_AFTER_S = 10.0  # a guess: beyond the drain that the launcher grants its children
_SERVING = re.compile(r"^serving .* on (https?://\S+)$")
_OWN = ("model", "host", "port", "api_key", "api_keys_file")


class LocalServer:
    """A server that starts when it is made and answers after `wait_ready`; `close` drains it and waits for its end.

    `options` are those of `tandem serve` by their names (`max_model_len=4096`). It ends with this process, too, however
    that ends. Raises ConfigError for an unknown option.
    """

    def __init__(self, model: str, options: Mapping[str, Any], start_s: float, quiet: bool) -> None:
        self.api_key = secrets.token_hex(16)
        values = {**_values(model, options), "api_key": self.api_key}
        self._command = [sys.executable, "-m", "tandem.deploy.cli", "serve", *to_arguments(SERVE_OPTIONS, values)]
        self._environment = own_environment(os.environ) | to_environment(SERVE_OPTIONS, values)
        self.url = ""  # until it is ready
        self._quiet, self._ready_by = quiet, time.monotonic() + start_s
        self._start_s, self._readiness = start_s, threading.Lock()
        self._last_words: deque[str] = deque(maxlen=KEPT_LINES)
        self._found: queue.Queue[str | subprocess.Popen[str] | BaseException] = queue.Queue()
        # A thread of its own starts the child, reads it, and lives as long: the child dies with the thread.
        self._reader = watched_thread(self._run, "tandem-llm-server", on_failure=self._found.put)
        self._reader.start()
        started = self._found.get()
        if isinstance(started, BaseException):
            raise started
        assert isinstance(started, subprocess.Popen)
        drain_s = float(values.get("drain_s", Timeouts.drain_s))
        self._finalizer = weakref.finalize(self, _end, started, drain_s)

    def wait_ready(self) -> None:
        """Waits, on any thread, until it serves. Raises ConfigError when the server ended before it was ready, with its
        last words, or took too long; it has ended then."""
        with self._readiness:
            if self.url:
                return
            try:
                url = self._found.get(timeout=max(0.0, self._ready_by - time.monotonic()))
            except queue.Empty:
                self.close()
                problem = f"the server was not ready after {self._start_s:g} s; give it longer with start_s"
                raise ConfigError(problem) from None
            if not isinstance(url, str) or not url:
                self._found.put("")  # for whoever asks again
                self.close()
                raise ConfigError("the server ended before it was ready:\n" + "\n".join(self._last_words))
            self.url = url

    def close(self) -> None:
        """Ends the server. Idempotent: SIGTERM drains what is under way, SIGKILL follows where that takes too long."""
        self._finalizer()
        self._reader.join(KILL_AFTER_S)

    def _run(self) -> None:
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environment | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        self._found.put(process)
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._last_words.append(line.rstrip())
                if not self._quiet:
                    print(line, end="", file=sys.stderr, flush=True)
                if found := _SERVING.match(line):
                    self._found.put(found[1])
        self._found.put("")


def _end(process: subprocess.Popen[str], drain_s: float) -> None:
    process.terminate()
    try:
        process.wait(drain_s + KILL_AFTER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _values(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with which `tandem serve` is started. Raises ConfigError that names an unknown option or a wrong
    value."""
    values: dict[str, Any] = {"host": "127.0.0.1", "port": 0} | ({"model": model} if model else {})
    for given, meant in options.items():
        if given in WITHOUT_COUNTERPART:
            WITHOUT_COUNTERPART[given].heed(given, meant)
            continue
        name, value = translate(given, meant)
        if name in _OWN:
            raise ConfigError(f"{name} is for a server that others ask: start it with `tandem serve` and give url=")
        if name not in SERVE_OPTIONS:
            raise ConfigError(f"unknown option {name}{did_you_mean(name, SERVE_OPTIONS)}")
        values[name] = SERVE_OPTIONS[name].parse(value, name)
    return values
