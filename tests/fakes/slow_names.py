"""Host names under .test, as the system would look them up: here.test is this host, others nobody answers for."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest
from waiting import PATIENCE_S


class SlowNames:
    """`names`: what was asked for. Of other names than here.test nothing is heard until `may_answer`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.may_answer = threading.Event()
        self._look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._answer)

    def _answer(self, host: Any, *args: Any, **kwargs: Any) -> Any:
        if not str(host).endswith(".test"):
            return self._look_up(host, *args, **kwargs)
        self.names.append(host)
        if host == "here.test":
            return self._look_up("127.0.0.1", *args, **kwargs)
        self.may_answer.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_NONAME, "nobody has this name")
