"""Reading bodies with a limit and sending answers, straight on ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Iterable

from starlette.types import Receive, Scope, Send

from tandem.engine.contracts.errors import (
    AuthenticationError,
    BodyTooLargeError,
    ClientGoneError,
    InvalidRequestError,
    TandemError,
)
from tandem.router.text.openai_api import error_body

# How much of a body that is too large is read past the limit, and how long; guesses.
DISCARD_BYTES, DISCARD_S = 64 << 20, 10.0
GZIP = 16 + zlib.MAX_WBITS  # how zlib is told to read gzip's head
JSON, FORM = b"application/json", b"multipart/form-data"
JSON_TYPE = (b"content-type", JSON)
_CALLED = {JSON: "JSON", FORM: "a form with the file"}

Headers = Iterable[tuple[bytes, bytes]]


class UnsupportedMediaTypeError(InvalidRequestError):
    """A body of a type that this path doesn't read."""

    status, code = 415, "unsupported_media_type"


async def read_body(scope: Scope, receive: Receive, limit: int, is_form: bool = False) -> bytes:
    """The request's body, decompressed, of at most `limit` bytes: JSON, or a form. Raises UnsupportedMediaTypeError,
    BodyTooLargeError, and ClientGoneError when the client leaves before the end, or takes so long that http_protocol.py
    closes its connection."""
    is_compressed = _check_media_type(scope["headers"], FORM if is_form else JSON)
    too_large = BodyTooLargeError(f"the body is larger than {limit} bytes")
    length = _announced_length(scope["headers"])
    if length > limit:
        if not any(name == b"expect" for name, _ in scope["headers"]):
            await _discard(receive, length)
        raise too_large
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError("the client closed the connection before its body was complete")
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > limit:
            if more:
                await _discard(receive, 0)
            raise too_large
    return await asyncio.to_thread(_inflated, body, limit) if is_compressed else bytes(body)


def _inflated(body: bytearray, limit: int) -> bytes:
    inflater = zlib.decompressobj(wbits=GZIP)
    try:
        found = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequestError(f"the body is not gzip, as its Content-Encoding says: {error}") from None
    if len(found) > limit:
        raise BodyTooLargeError(f"the body is larger than {limit} bytes, once it is inflated")
    if not inflater.eof:
        raise InvalidRequestError("the body ends in the middle of its gzip stream")
    return found


def _check_media_type(headers: Headers, wanted: bytes) -> bool:
    """Whether the body is compressed by gzip. Refuses types that web pages may send anywhere without asking; a body
    without a type counts as JSON. Raises UnsupportedMediaTypeError."""
    is_compressed = False
    for name, value in headers:
        if name == b"content-type" and value.partition(b";")[0].strip().lower() != wanted:
            raise UnsupportedMediaTypeError(f"send {_CALLED[wanted]}, and say so: `Content-Type: {wanted.decode()}`")
        if name == b"content-encoding" and (encoding := value.strip().lower()) != b"identity":
            if encoding != b"gzip" or is_compressed:
                raise UnsupportedMediaTypeError("send the body as it is, or by `Content-Encoding: gzip`, once")
            is_compressed = True
    return is_compressed


def _announced_length(headers: Headers) -> int:
    return next((int(value) for name, value in headers if name == b"content-length"), 0)


async def _discard(receive: Receive, length: int) -> None:
    """Reads on, within bounds: a connection that is closed while its client still sends is reset, and most clients
    then never see the answer."""

    async def read_on() -> None:
        num_bytes, more = 0, length <= DISCARD_BYTES
        while more and num_bytes <= DISCARD_BYTES:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            more = message.get("more_body", False)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read_on(), DISCARD_S)


async def send_whole(send: Send, status: int, body: bytes, headers: Headers = (JSON_TYPE,)) -> None:
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: TandemError) -> None:
    await send_whole(send, error.status, error_body(error), error_headers(error))


def our_fault() -> TandemError:
    return TandemError("the server made an error; its log says more")


def error_headers(error: TandemError) -> list[tuple[bytes, bytes]]:
    headers = [JSON_TYPE]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, round(error.retry_after_s))))
    if isinstance(error, AuthenticationError):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, BodyTooLargeError):
        headers.append((b"connection", b"close"))  # since the rest of the body is not read
    return headers


async def wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
