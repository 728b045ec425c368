"""A Redis of a few dictionaries, as far as the directory's own code asks it for what peers keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.kv_connector.directory.records import KeySpace

KEYS = KeySpace("t")


class Server:
    """What the directory's own code asks of Redis, and of the servers of one."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.sets: dict[str, set[bytes]] = {}
        self._answers: list[Any] = []

    def client_for(self, key: str) -> Server:
        return self

    def pipeline(self, transaction: bool) -> Server:
        return self

    def __enter__(self) -> Server:
        self._answers = []
        return self

    def __exit__(self, *_: object) -> None: ...

    def execute(self) -> list[Any]:
        return self._answers

    def smembers(self, key: str) -> list[bytes]:
        return [name.encode() for name in self.records]

    def get(self, key: str) -> bytes | None:
        return next((record for name, record in self.records.items() if KEYS.node(name) == key), None)

    def smismember(self, key: str, hashes: Sequence[bytes]) -> None:
        self._answers.append([each in self.sets.get(key, ()) for each in hashes])

    def sadd(self, key: str, *hashes: bytes) -> None:
        self.sets.setdefault(key, set()).update(hashes)

    def srem(self, key: str, *hashes: bytes) -> None:
        self.sets.get(key, set()).difference_update(hashes)

    def unlink(self, *keys: str) -> None:
        for key in keys:
            self.sets.pop(key, None)

    def set(self, *_: object) -> None: ...

    def incr(self, key: str) -> None: ...

    def pexpire(self, *_: object) -> None: ...

    def publish(self, *_: object) -> None: ...
