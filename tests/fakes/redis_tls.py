"""A real Redis behind TLS with a throwaway CA. Not every redis-server is built with TLS, so it ends in front of it."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from waiting import PATIENCE_S

from redis_process import running_redis


@dataclass
class Certificates:
    """PEM files: a CA, a server's certificate for 127.0.0.1, a client's."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.crt"

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.crt"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"


def make_certificates(folder: Path) -> Certificates:
    """By the openssl command, which must be there."""
    made = Certificates(folder)
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    may_sign = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 refuses a CA that does not say so
    _openssl(
        "req",
        "-x509",
        *new_key,
        "-keyout",
        made.key("ca"),
        "-out",
        made.ca,
        "-days",
        2,
        "-subj",
        "/CN=test CA",
        *may_sign,
    )
    for name in ("server", "client"):
        request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", *new_key, "-keyout", made.key(name), "-out", request, "-subj", f"/CN={name}")
        signer = ("-CA", made.ca, "-CAkey", made.key("ca"), "-CAcreateserial")
        signed = ("-extfile", extensions, "-out", made.certificate(name))
        _openssl("x509", "-req", "-in", request, *signer, "-days", 2, *signed)
    return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@contextmanager
def running_redis_with_tls(certificates: Certificates) -> Iterator[str]:
    """host:port that speaks TLS and wants a client's certificate."""
    with running_redis() as server, TlsFront(certificates, server.port) as front:
        yield f"127.0.0.1:{front.port}"


class TlsFront:
    """Ends TLS and passes bytes on to a loopback port."""

    def __init__(self, certificates: Certificates, target_port: int) -> None:
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(certificates.ca))
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._context.load_cert_chain(certificates.certificate("server"), certificates.key("server"))
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> TlsFront:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        """One thread both ways: a TLS connection may not be read and written by two at once."""
        with (
            suppress(OSError),
            self._context.wrap_socket(plain, server_side=True) as client,
            socket.create_connection(("127.0.0.1", self._target_port)) as server,
        ):
            for end in (client, server):
                end.settimeout(0.01)
            while self._pass_on(client, server) and self._pass_on(server, client):
                pass

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> bool:
        try:
            data = source.recv(1 << 16)
        except TimeoutError:
            return True
        sink.settimeout(PATIENCE_S)
        sink.sendall(data)
        sink.settimeout(0.01)
        return bool(data)
