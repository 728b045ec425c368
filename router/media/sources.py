"""The bytes that a part's URL names: its own, or, where the operator allows it, another host's."""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes, urlsplit

import httpx

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.media.parts import MediaPart

MAX_FETCHES = 8  # at a time, of one router process; a guess


class MediaSources:
    """Gets the bytes of parts. `domains`: hosts that may be fetched from, none by default. A name among them must lead
    to public addresses, or a client could read what only this machine can reach. An address among them may be any."""

    def __init__(self, domains: Sequence[str], max_bytes: int, timeout_s: float) -> None:
        self._domains = frozenset(domain.lower() for domain in domains)
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._slots = asyncio.Semaphore(MAX_FETCHES)

    async def bytes_of(self, part: MediaPart) -> bytes:
        """The bytes that the part's URL names. Raises InvalidRequestError that names the part."""
        scheme = part.url[:5].lower()
        if scheme == "data:":
            return _inline(part)
        if not scheme.startswith("http"):
            raise refused(part, "its URL must begin with data:, http: or https:")
        try:
            async with self._slots:
                return await asyncio.wait_for(self._fetch(part), self._timeout_s)
        except (asyncio.TimeoutError, TimeoutError):
            raise refused(part, f"it did not come within {self._timeout_s:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError, ValueError) as error:
            raise refused(part, f"it can't be fetched: {type(error).__name__}") from None

    async def _fetch(self, part: MediaPart) -> bytes:
        parts = urlsplit(part.url)
        host = (parts.hostname or "").lower()
        if host not in self._domains:
            raise refused(
                part, "nothing is fetched from its host: send a data: URL (hosts are the operator's to allow, by "
                "--allowed-media-domains)",
            )  # fmt: skip
        url = httpx.URL(part.url)
        # Connected to is the address that was looked at: another lookup might answer with another.
        request = httpx.Request(
            "GET",
            url.copy_with(host=await self._address(part, host, parts.port or (443 if url.scheme == "https" else 80))),
            headers={"host": url.netloc.decode("ascii"), "accept": "image/*, audio/*"},
            extensions={"sni_hostname": host},
        )
        async with httpx.AsyncClient(follow_redirects=False, trust_env=False, timeout=self._timeout_s) as client:
            response = await client.send(request, stream=True)
            try:
                if response.status_code != 200:
                    raise refused(part, f"its host answered {response.status_code}")
                return await self._whole(part, response)
            finally:
                await response.aclose()

    async def _whole(self, part: MediaPart, response: httpx.Response) -> bytes:
        found = bytearray()
        async for chunk in response.aiter_bytes():
            found += chunk
            if len(found) > self._max_bytes:
                raise refused(part, f"it has more than {self._max_bytes} bytes")
        return bytes(found)

    async def _address(self, part: MediaPart, host: str, port: int) -> str:
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in found]
        if not addresses or not all(ipaddress.ip_address(each.partition("%")[0]).is_global for each in addresses):
            raise refused(part, "its host has an address that isn't public")
        return addresses[0]


def refused(part: MediaPart, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{part.place} ({part.kind}): {why}", param="messages")


def _inline(part: MediaPart) -> bytes:
    """The bytes of a data: URL (RFC 2397)."""
    head, comma, data = part.url.partition(",")
    if not comma:
        raise refused(part, "its data: URL has no comma before the data")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(data)
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise refused(part, "its data is not base64") from None
