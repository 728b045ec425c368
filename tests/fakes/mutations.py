"""Bytes and values that are nearly right, or not at all: for fuzzing whatever reads what comes from outside. Seeded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

INTEGERS = (0, 1, -1, 127, 128, 255, 2**31 - 1, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1)
FLOATS = (0.0, -0.0, 1e308, -1e308, 5e-324, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "a", "\x00", "é日本😀", "}{", "tcp://", "garbage", "../..", "x" * 300, "\u2028", "%s%n")


def junk(rng: random.Random, depth: int = 0) -> Any:
    """A value of some type that msgpack and JSON know."""
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind == 0:
        return rng.choice(INTEGERS)
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.randbytes(rng.choice((0, 1, 3, 4, 16, 17, 64)))
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return rng.randrange(-5, 300)
    if kind == 6:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(TEXTS): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def changed(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """`value` with one part of it replaced, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        rest = {name: part for name, part in value.items() if name != key}
        if rng.random() < 0.1:
            return rest
        return {**rest, key: changed(rng, value[key], depth + 1)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        index = rng.randrange(len(value))
        parts = list(value)
        how = rng.random()
        if how < 0.1:
            del parts[index]
        elif how < 0.2:
            parts.insert(index, parts[index])
        else:
            parts[index] = changed(rng, parts[index], depth + 1)
        return parts
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.6:
        return rng.choice((*INTEGERS, value + 1, value - 1))  # stays what the type asks for
    if isinstance(value, str) and rng.random() < 0.6:
        return rng.choice(TEXTS)
    if isinstance(value, bytes) and rng.random() < 0.6:
        return rng.randbytes(rng.randrange(40))
    return junk(rng)


def flipped(rng: random.Random, data: bytes) -> bytes:
    """`data` with some bits or bytes changed, cut off, or put in."""
    changed_data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed_data) + 1)
        how = rng.randrange(4)
        if how == 0 and at < len(changed_data):
            changed_data[at] ^= 1 << rng.randrange(8)
        elif how == 1 and at < len(changed_data):
            changed_data[at] = rng.randrange(256)
        elif how == 2:
            del changed_data[at:]
        else:
            changed_data[at:at] = rng.randbytes(rng.randrange(1, 5))
    return bytes(changed_data)


def msgpack_cases(rng: random.Random, valid: Sequence[Any], number: int) -> Iterator[bytes]:
    """Random bytes, valid messages with bits flipped, and valid msgpack of nearly valid content."""
    plain = [msgspec.to_builtins(message, builtin_types=(bytes,)) for message in valid]
    return _cases(rng, msgspec.msgpack.encode, valid, plain, number)


def json_cases(rng: random.Random, valid: Sequence[Any], number: int) -> Iterator[bytes]:
    """As `msgpack_cases`, of JSON."""
    return _cases(rng, msgspec.json.encode, valid, valid, number)


def _cases(
    rng: random.Random, encode: Callable[[Any], bytes], valid: Sequence[Any], plain: Sequence[Any], number: int
) -> Iterator[bytes]:
    encoded = [encode(value) for value in valid]
    for case in range(number):
        kind = case % 4
        if kind == 0:
            yield rng.randbytes(rng.randrange(60))
        elif kind == 1:
            yield flipped(rng, rng.choice(encoded))
        elif kind == 2:
            yield encode(changed(rng, rng.choice(plain)))
        else:
            yield encode(junk(rng))
