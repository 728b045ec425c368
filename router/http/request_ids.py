"""X-Request-Id: what a client gives comes back with the answer, and one is made up for who gives none."""

from __future__ import annotations

import re
import uuid

from starlette.types import Message, Scope, Send

from tandem.router.text.request_headers import REQUEST_ID

_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,256}")  # what else there is would be another header, or none


def with_request_id(scope: Scope, send: Send) -> Send:
    """The same `send`, whose answer carries the request's id, as the request's own headers then do. Ids need not be
    unique: nothing is looked up by them."""
    request_id = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    if not _PRINTABLE.fullmatch(request_id):
        request_id = uuid.uuid4().hex.encode()
        scope["headers"].append((REQUEST_ID, request_id))

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
        await send(message)

    return send_with_id
