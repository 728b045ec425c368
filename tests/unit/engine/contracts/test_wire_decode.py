"""Bytes from outside that are no message are one error, whatever is wrong with them."""

from __future__ import annotations

import msgspec
import pytest

from tandem.engine.contracts.errors import DecodeError
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.requests import Cancel

CANCEL = codec.encode(Cancel(request_id="r", attempt=1))
BAD = {
    "empty": b"",
    "cut short": CANCEL[:-1],
    "text that is not UTF-8": CANCEL.replace(b"\xa1r", b"\xa1\xff"),
    "a tag that is not UTF-8": CANCEL.replace(b"\xa6Cancel", b"\xa6Canc\xff\xfe"),
    "a number out of range": CANCEL[:-1] + b"\xcf" + b"\xff" * 8 + b"\x00",
    "a list of 2^32 items": b"\xdd\xff\xff\xff\xff",
    "no such message": msgspec.msgpack.encode({"type": "Nonsense"}),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_whatever_is_wrong_with_a_message_is_one_error(data):
    with pytest.raises(DecodeError):
        codec.decode_to_node(data)


def test_nesting_without_end_is_that_error_too():
    with pytest.raises(DecodeError, match="Recursion"):
        WireDecoder(object)(b"\x91" * 100_000)


def test_a_message_is_read_from_bytes_and_from_views():
    for data in (CANCEL, bytearray(CANCEL), memoryview(CANCEL)):
        assert codec.decode_to_node(data) == Cancel(request_id="r", attempt=1)
