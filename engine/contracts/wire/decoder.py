"""Reading bytes that came from outside: whatever is wrong with them is one error."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from tandem.engine.contracts.errors import DecodeError

T = TypeVar("T")


class WireDecoder(Generic[T]):
    """Turns msgpack into a `kind`, which may be a union of tagged Structs. Immutable, safe to call from every thread.

    msgspec has errors of its own for bytes that don't fit the type, but text that is not UTF-8 raises
    UnicodeDecodeError, and nesting without end RecursionError: whoever catches the first alone dies of the others.
    """

    def __init__(self, kind: Any, dec_hook: Any = None) -> None:
        self._decode = msgspec.msgpack.Decoder(kind, dec_hook=dec_hook).decode

    def __call__(self, data: bytes | bytearray | memoryview) -> T:
        """Raises DecodeError for whatever is no such message."""
        try:
            decoded: T = self._decode(data)
        except Exception as error:  # the bytes are all that can be at fault, and any exception says no more
            raise DecodeError(f"{type(error).__name__}: {error}") from None
        return decoded
