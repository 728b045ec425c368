"""A server's error objects as the errors of Tandem."""

from __future__ import annotations

from typing import Any

from tandem.engine.contracts.errors import (
    AuthenticationError,
    BodyTooLargeError,
    DeadlineError,
    InvalidRequestError,
    ModelNotFoundError,
    NodeFailedError,
    OverloadedError,
    TandemError,
    UnavailableError,
)

_BY_STATUS: dict[int, type[TandemError]] = {
    kind.status: kind
    for kind in (
        AuthenticationError, BodyTooLargeError, DeadlineError, InvalidRequestError, ModelNotFoundError, NodeFailedError,
        OverloadedError, UnavailableError,
    )
}  # fmt: skip
_BY_TYPE: dict[str, type[TandemError]] = {
    kind.type: kind for kind in (NodeFailedError, UnavailableError, DeadlineError, OverloadedError, InvalidRequestError)
}


def error_of(answer: Any, status: int | None = None) -> TandemError:
    """The error that a body (`{"error": {...}}`) or an event of a stream tells of; `status` where there is one."""
    said = answer.get("error") if isinstance(answer, dict) else None
    said = said if isinstance(said, dict) else {}
    message = str(said.get("message") or f"the server answered {status} without a message")
    kind = _BY_STATUS.get(status or 0) or _BY_TYPE.get(str(said.get("type")), TandemError)
    return kind(message) if kind is OverloadedError else kind(message, param=said.get("param"))
