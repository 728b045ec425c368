"""The little HTTP that a load generator needs: text and JSON by GET, events by POST. One connection a request.

Own code on asyncio streams, because a general client costs several times more per event than the server spends.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

from tandem.engine.contracts.errors import ConfigError

MAX_LINE_BYTES = 1 << 22  # a guess: far above an event with log-probabilities


class HttpError(Exception):
    """The server refused, or broke off."""


async def model_to_ask(url: str, api_key: str, wished: str = "") -> str:
    """`wished`, else the first model that the server lists. Raises ConfigError where it doesn't answer."""
    try:
        return wished or str((await get_json(url, "/v1/models", api_key))["data"][0]["id"])
    except (OSError, HttpError, ValueError, LookupError) as error:
        raise ConfigError(f"{url} does not answer as it should: {error}; check --url and --api-key") from None


async def get_json(url: str, path: str, api_key: str = "") -> Any:
    """GETs JSON. Raises HttpError for a status other than 200, OSError, ValueError for a body that is not JSON."""
    return json.loads(await get_text(url, path, api_key))


async def get_text(url: str, path: str, api_key: str = "") -> str:
    """GETs text. Raises HttpError for a status other than 200, OSError, ValueError for a body that is not UTF-8."""
    reader, writer = await _connect(url)
    try:
        writer.write(_head("GET", url, path, api_key, 0))
        return b"".join([chunk async for chunk in _body(reader)]).decode()
    finally:
        writer.close()


async def post_json(url: str, path: str, body: Any, api_key: str = "") -> Any:
    """Like `get_json`, with a body."""
    payload = json.dumps(body).encode()
    reader, writer = await _connect(url)
    try:
        writer.write(_head("POST", url, path, api_key, len(payload)) + payload)
        return json.loads(b"".join([chunk async for chunk in _body(reader)]))
    finally:
        writer.close()


async def stream_events(
    url: str, path: str, body: Any, api_key: str = "", headers: dict[bytes, bytes] | None = None
) -> AsyncIterator[bytes]:
    """The `data:` of each event as it comes; `headers` is filled with the answer's, names in lower case. Raises
    HttpError for a status other than 200, EOFError when cut off."""
    payload = json.dumps(body).encode()
    reader, writer = await _connect(url)
    try:
        writer.write(_head("POST", url, path, api_key, len(payload)) + payload)
        pending = b""
        async for chunk in _body(reader, headers):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()
    finally:
        writer.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http:// or https:// address")
    return await asyncio.open_connection(
        parts.hostname,
        parts.port or (443 if secure else 80),
        ssl=ssl.create_default_context() if secure else None,
        limit=MAX_LINE_BYTES,
    )


def _head(method: str, url: str, path: str, api_key: str, num_bytes: int) -> bytes:
    parts = urlsplit(url)
    base = parts.path.rstrip("/").removesuffix("/v1")  # as OpenAI's clients want it
    lines = [f"{method} {base}{path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close"]
    if num_bytes:
        lines += ["Content-Type: application/json", f"Content-Length: {num_bytes}"]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode()


async def _body(reader: asyncio.StreamReader, headers: dict[bytes, bytes] | None = None) -> AsyncIterator[bytes]:
    """The body's parts as they come, chunked or not."""
    status = (await reader.readline()).split(b" ", 2)
    if len(status) < 2 or not status[1].isdigit():
        raise HttpError("the answer is not HTTP")
    headers = {} if headers is None else headers
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip()
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        parts = _chunks(reader)
    else:
        parts = _plain(reader, int(headers.get(b"content-length", b"-1")))
    if status[1] != b"200":
        text = b"".join([part async for part in parts]).decode(errors="replace")
        raise HttpError(f"HTTP {status[1].decode()}: {_message_of(text)[:300]}")
    async for part in parts:
        yield part


def _message_of(body: str) -> str:
    """What an error says, in OpenAI's shape; else the body itself."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await _size_line(reader), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _size_line(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readline()
    if not line.strip():
        raise EOFError("the connection closed in the middle of the answer")
    return line.split(b";")[0]


async def _plain(reader: asyncio.StreamReader, num_bytes: int) -> AsyncIterator[bytes]:
    yield await (reader.readexactly(num_bytes) if num_bytes >= 0 else reader.read(-1))
