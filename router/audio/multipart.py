"""Bodies of multipart/form-data (RFC 7578), whole and in memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.engine.contracts.errors import InvalidRequestError

MAX_PARTS = 64  # a guess: transcriptions have ten fields, some of them lists
MAX_HEAD_BYTES = 8192  # of a part's headers; a guess
_NAME = re.compile(rb'[;\s]name="((?:[^"\\]|\\.)*)"', re.IGNORECASE)
_FILE = re.compile(rb"[;\s]filename\*?=", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class FormPart:
    """One field of a form, or one file in it."""

    name: str
    data: bytes
    is_file: bool


def parse_form(body: bytes) -> list[FormPart]:
    """The parts of a body, in order. It begins with its boundary, as clients send it. Raises InvalidRequestError."""
    boundary, _, _ = body[:256].partition(b"\r\n")
    if not boundary.startswith(b"--") or not 2 < len(boundary) <= 72:
        raise InvalidRequestError("the body is not multipart/form-data: it does not begin with a boundary")
    pieces = (b"\r\n" + body).split(b"\r\n" + boundary)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--"):
        raise InvalidRequestError("the body ends in the middle of its multipart/form-data")
    if len(pieces) > MAX_PARTS + 2:
        raise InvalidRequestError(f"the body has more than {MAX_PARTS} parts")
    return [_part(piece) for piece in pieces[1:-1]]


def _part(piece: bytes) -> FormPart:
    end = piece.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES)
    name = None if end < 0 else _disposition(piece[:end])
    if name is None:
        raise InvalidRequestError("a part of the body has no name: send fields by `Content-Disposition: form-data`")
    found = _NAME.search(name)
    assert found is not None
    field = found.group(1).decode(errors="replace").removesuffix("[]")
    return FormPart(field, piece[end + 4 :], _FILE.search(name) is not None)


def _disposition(head: bytes) -> bytes | None:
    """The header that names the part."""
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-disposition:") and _NAME.search(line):
            return line
    return None
