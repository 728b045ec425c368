"""Bytes that nobody should send: random ones, messages with flipped bits, and well-formed messages that make no sense.

Everything follows from a seed, so that what was found can be found again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

ABSURD_INTS = (
    *(-1, 0, 1, 2, 17, 255, 1 << 16, (1 << 31) - 1, 1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    -(1 << 63),
)
ABSURD_FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-300, 1e300)
ABSURD_TEXTS = ("", "garbage", "tcp://x:y", "tcp://127.0.0.1:1", "\0", "é" * 300, "x" * 5000, "@", "f0")
ABSURD_OTHERS = (None, True, [], {}, [[]], b"")
MOST_COPIES = 300


class WireFuzz:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def noise(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 3, 7, 16, 40, 200, 2000)))

    def mutated(self, payload: bytes) -> bytes:
        """Some bits, bytes or runs of `payload` are others, or missing, or there twice."""
        data = bytearray(payload)
        for _ in range(self.rng.choice((1, 1, 1, 2, 5))):
            at = self.rng.randrange(len(data) + 1)
            end = min(len(data), at + self.rng.choice((1, 1, 2, 8)))
            kind = self.rng.randrange(6)
            if kind == 0 and at < len(data):
                data[at] ^= 1 << self.rng.randrange(8)
            elif kind == 1:
                data[at:end] = self.rng.randbytes(end - at)
            elif kind == 2:
                del data[at:end]
            elif kind == 3:
                data[at:at] = self.rng.randbytes(self.rng.choice((1, 4, 30)))
            elif kind == 4:
                del data[at:]
            else:
                data[at:end] = self.rng.choice((b"\xff", b"\xc0", b"\xdd\xff\xff\xff\xff", b"\xcb\x7f\xf8\0\0\0\0\0\0"))
        return bytes(data)

    def absurd(self, message: Any) -> bytes:
        """A message of the same form, some leaves of which are absurd, mostly of their own type."""
        value = _plain(message)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            value = self._changed(value)
        return msgspec.msgpack.encode(value)

    def any_of(self, messages: Sequence[Any]) -> bytes:
        """As it is, or worse."""
        message = self.rng.choice(messages)
        way: Callable[[], bytes] = self.rng.choice(
            (
                lambda: msgspec.msgpack.encode(message),
                lambda: msgspec.msgpack.encode(message),
                lambda: self.mutated(msgspec.msgpack.encode(message)),
                lambda: self.absurd(message),
                lambda: self.absurd(message),
                self.noise,
            )
        )
        return way()

    def _changed(self, value: Any) -> Any:
        if isinstance(value, dict) and value and self.rng.random() < 0.95:
            key = self.rng.choice([key for key in value if key != "type"] or list(value))
            if self.rng.random() < 0.03:
                return {name: each for name, each in value.items() if name != key}
            return {**value, key: self._changed(value[key])}
        if isinstance(value, list) and value and self.rng.random() < 0.7:
            place = self.rng.randrange(len(value))
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        return self._leaf(value)

    def _leaf(self, value: Any) -> Any:
        choice = self.rng.choice
        if self.rng.random() < 0.05:
            return choice(ABSURD_OTHERS)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return choice((*ABSURD_INTS, value + 1, value - 1)) if abs(value) < 1 << 62 else choice(ABSURD_INTS)
        if isinstance(value, float):
            return choice((*ABSURD_FLOATS, -value))
        if isinstance(value, str):
            return choice(ABSURD_TEXTS)
        if isinstance(value, bytes):
            return choice((b"", value[:-1], value * 3, self.noise(), b"\xff" * 4, b"\0\0\0\x80"))
        if isinstance(value, list):
            return choice(([], value * self.rng.randrange(2, MOST_COPIES), value[:-1], [choice(ABSURD_INTS)]))
        return choice((choice(ABSURD_INTS), choice(ABSURD_TEXTS), choice(ABSURD_OTHERS)))


def _plain(message: Any) -> Any:
    """The message as maps and lists, bytes kept."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message))
