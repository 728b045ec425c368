"""What is done around every path: X-Request-Id comes back with the answer; CORS, compression, TLS."""

from __future__ import annotations

import re
import ssl
import uuid
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Scope, Send

from tandem.engine.contracts.config import WebOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.router.text.request_headers import REQUEST_ID

EXPOSED_HEADERS = ("X-Request-Id", "X-Tandem-Placement", "Retry-After")  # headers that pages in browsers may read
GZIP_LEVEL = 1  # a guess: answers are compressed while others wait
_PRINTABLE = re.compile(rb"[\x21-\x7e]{1,256}")  # other bytes could end the header, or begin another one


def with_request_id(scope: Scope, send: Send) -> Send:
    """A `send` that adds the request's id to the answer's headers; a request without one gets one in its headers.
    Ids need not be unique, since nothing is looked up by them."""
    request_id = next((value for name, value in scope["headers"] if name == REQUEST_ID), b"")
    if not _PRINTABLE.fullmatch(request_id):
        request_id = uuid.uuid4().hex.encode()
        scope["headers"].append((REQUEST_ID, request_id))

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
        await send(message)

    return send_with_id


def around(app: ASGIApp, web: WebOptions) -> ASGIApp:
    """The application with what these options put around it; what isn't asked for costs nothing."""
    if web.gzip_min_bytes:
        app = GZipMiddleware(app, web.gzip_min_bytes, GZIP_LEVEL)
    if web.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=web.allowed_origins,
            allow_methods=web.allowed_methods,
            allow_headers=web.allowed_headers,
            allow_credentials=web.allow_credentials,
            expose_headers=EXPOSED_HEADERS,
        )
    return app


def tls_settings(web: WebOptions) -> dict[str, Any]:
    """uvicorn's settings for TLS. Raises ConfigError when the certificate or key can't be used."""
    if not web.ssl_certfile:
        if web.ssl_keyfile or web.ssl_ca_certs or web.ssl_cert_reqs:
            raise ConfigError("HTTPS needs a certificate: --ssl-certfile")
        return {}
    if web.ssl_cert_reqs and not web.ssl_ca_certs:
        raise ConfigError("--ssl-cert-reqs checks clients' certificates by --ssl-ca-certs: name that file")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(web.ssl_certfile, web.ssl_keyfile or None, password="")
        if web.ssl_ca_certs:
            context.load_verify_locations(web.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(filter(None, (web.ssl_certfile, web.ssl_keyfile, web.ssl_ca_certs)))
        raise ConfigError(f"HTTPS can't be served with {files}: {error.strerror or error}") from None
    return {
        "ssl_certfile": web.ssl_certfile,
        "ssl_keyfile": web.ssl_keyfile or None,
        "ssl_ca_certs": web.ssl_ca_certs or None,
        "ssl_cert_reqs": web.ssl_cert_reqs,
    }
