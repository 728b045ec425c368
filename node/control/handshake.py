"""Decides whom a node accepts as a peer, and how it answers the others. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tandem.engine.contracts.errors import HandshakeError
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Refused
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.engine.process.process_log import RateLimited

MAX_SHOWN = 200  # characters of what a peer sent, in a reason; a guess
limited = RateLimited(logging.getLogger(__name__))


class Handshake:
    """Decides who may connect. `check_peer` raises HandshakeError when a node peer must be refused. Whatever else it
    raises comes of what that peer says of itself, and refuses it as well."""

    def __init__(self, check_peer: Callable[[NodeInfo], None]) -> None:
        self._check_peer = check_peer

    def refusal(self, hello: Hello) -> Refused | None:
        """The answer to a Hello that is not welcome; None if it is."""
        if hello.wire_version != WIRE_VERSION:
            return Refused(field="wire_version", ours=str(WIRE_VERSION), theirs=str(hello.wire_version))
        error = self._check(hello.info) if hello.info.role != "router" else None
        return None if error is None else Refused(field=error.field, ours=str(error.ours), theirs=str(error.theirs))

    def problem(self, expected: PeerRef, info: NodeInfo) -> str:
        """The reason why the sender of a Welcome is not the peer that was meant, or can't be one; "" if it can."""
        if info.key != expected.key:
            return f"epoch differs (expected {expected.key}, found {info.key})"
        error = self._check(info)
        return "" if error is None else error.message

    def _check(self, info: NodeInfo) -> HandshakeError | None:
        try:
            self._check_peer(info)
        except HandshakeError as error:
            return error
        except Exception as error:
            limited.exception("what a peer says of itself makes no sense")
            return HandshakeError("info", "what a node says of itself", repr(error)[:MAX_SHOWN])
        return None
