"""Every error that Tandem raises on purpose, and how it looks over HTTP.

TandemError                    500 server_error
├── InvalidRequestError        400 invalid_request_error
│   ├── ModelNotFoundError     404
│   ├── AdapterError           400
│   ├── AuthenticationError    401 authentication_error
│   ├── ScopeError             403 permission_error
│   └── BodyTooLargeError      413
├── ConfigError (ValueError)   -
│   └── CheckpointError        -
├── HandshakeError             -
├── DecodeError                -
├── GrantError                 -
├── TransportError             -
│   └── PeerLostError          -
├── OverloadedError            429 rate_limit_error
│   └── RateLimitError         429
├── UnavailableError           503 service_unavailable
│   └── NoNodeError            503
├── DeadlineError              504 timeout
├── ClientGoneError            499
└── NodeFailedError            502 server_error
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of all errors. `request_id` is set where the error belongs to one request."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, request_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.request_id = request_id

    def add(self, text: str) -> None:
        """Appends `text`, which became known after the error was made, to its message."""
        self.message += text


class InvalidRequestError(TandemError):
    """The client's fault; `param` names the field."""

    status, type = 400, "invalid_request_error"
    code: str | None = None


class ModelNotFoundError(InvalidRequestError):
    """No model of that name is served."""

    status, code = 404, "model_not_found"


class AdapterError(InvalidRequestError):
    """An adapter can't be served; the message names the file or the field."""

    code = "bad_adapter"


class AuthenticationError(InvalidRequestError):
    """A request without a valid API key."""

    status, type, code = 401, "authentication_error", "invalid_api_key"


class ScopeError(InvalidRequestError):
    """A valid key lacks the scope for this; it may do other things."""

    status, type, code = 403, "permission_error", "insufficient_scope"


class BodyTooLargeError(InvalidRequestError):
    """A request's body is longer than the router reads."""

    status, code = 413, "body_too_large"


class ConfigError(TandemError, ValueError):
    """A bad flag, file or folder: it ends the process, and the message says what to do."""

    code = "bad_config"


class CheckpointError(ConfigError):
    """The model folder can't be served; the message names the file."""

    code = "bad_checkpoint"


class HandshakeError(TandemError):
    """Two processes refuse each other. `field` names what differs, `ours` and `theirs` the two values."""

    code = "handshake_refused"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"handshake refused: {field} differs (ours {ours!r}, theirs {theirs!r})")
        self.field, self.ours, self.theirs = field, ours, theirs


class DecodeError(TandemError):
    """Bytes from outside are no message. They are dropped."""

    code = "bad_message"


class GrantError(TandemError):
    """A grant is forged, foreign, replayed or out of date."""

    code = "bad_grant"


class TransportError(TandemError):
    """KV bytes could not be moved. They are sent again, or the KV is computed anew."""

    code = "transport_failed"


class PeerLostError(TransportError):
    """The peer of a transfer is gone or fenced."""

    code = "peer_lost"


class OverloadedError(TandemError):
    """Queues are full; `retry_after_s` says when to come back."""

    status, type, code = 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """The key has used up what it may, for now."""

    code = "rate_limit_exceeded"


class UnavailableError(TandemError):
    """Not now; `retry_after_s` says when to come back."""

    status, type, code = 503, "service_unavailable", "unavailable"
    retry_after_s = 5.0  # a guess: by then a process that ended runs again, and a lost node is replaced


class NoNodeError(UnavailableError):
    """No node could take the request in time."""


class DeadlineError(TandemError):
    """The request's deadline passed."""

    status, type, code = 504, "timeout", "deadline_exceeded"


class ClientGoneError(TandemError):
    """The client closed the connection. The status is for the log: nobody reads the answer."""

    status, type, code = 499, "client_closed_request", "client_gone"


class NodeFailedError(TandemError):
    """A node failed the request, and no attempt is left."""

    status, type, code = 502, "server_error", "node_failed"
