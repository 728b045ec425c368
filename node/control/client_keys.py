"""Who may open a connection to a CURVE socket: ZMQ asks for each client key over ZAP (RFC 27), inside the process."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

import zmq

ADDRESS = "inproc://zeromq.zap.01"
DOMAIN = b"tandem"
_FIELDS_BEFORE_KEY = 6  # version, request id, domain, address, identity, mechanism


class ClientKeys:
    """Answers for the sockets of one context that `require` it; until `answer` is called their clients wait. CURVE by
    itself lets every client in that knows the server's public key, whatever its own."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed_key: bytes) -> None:
        """`allowed_key`: the one public key, 32 bytes."""
        self._allowed = allowed_key
        self.num_refused = 0
        self.socket = context.socket(zmq.REP)
        self.socket.bind(ADDRESS)

    def require(self, server: zmq.Socket[bytes]) -> None:
        """Asks for keys on a socket, before it is bound. Without an answer nobody gets in."""
        server.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        server.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def answer(self) -> None:
        """Answers one question that waits at `socket`."""
        question = self.socket.recv_multipart()
        is_known = self._is_known(question)
        self.num_refused += not is_known
        status = (b"200", b"OK") if is_known else (b"400", b"this is no key of the cluster")
        self.socket.send_multipart([b"1.0", question[1], *status, b"", b""])

    def close(self) -> None:
        self.socket.close(linger=0)

    def _is_known(self, question: Sequence[bytes]) -> bool:
        if len(question) != _FIELDS_BEFORE_KEY + 1 or question[5] != b"CURVE":
            return False
        return hmac.compare_digest(question[_FIELDS_BEFORE_KEY], self._allowed)
