"""Every error that Tandem raises on purpose, and how it looks over HTTP.

TandemError                    500 server_error
├── InvalidRequestError        400 invalid_request_error   the client's fault; `param` names the field
│   ├── ModelNotFoundError     404                         no model of that name is served
│   ├── AdapterError           400                         an adapter can't be served; names the file or the field
│   ├── AuthenticationError    401 authentication_error
│   ├── ScopeError             403 permission_error        the key may do other things alone
│   └── BodyTooLargeError      413
├── ConfigError (ValueError)   -                           bad flag, file or folder: ends the process with a remedy
│   └── CheckpointError        -                           the model folder can't be served; names the file
├── HandshakeError             -                           two processes refuse each other; names the field
├── DecodeError                -                           bytes from outside are no message; they are dropped
├── GrantError                 -                           a grant is forged, foreign, replayed or out of date
├── TransportError             -                           bytes could not be moved; retried or recomputed
│   └── PeerLostError          -                           the peer is gone or fenced
├── OverloadedError            429 rate_limit_error        queues are full; `retry_after_s` says when to come back
│   └── RateLimitError         429                         the key has used up what it may, for now
├── UnavailableError           503 service_unavailable     not now; `retry_after_s` says when to come back
│   └── NoNodeError            503                         no node could take the request in time
├── DeadlineError              504 timeout                 the request's deadline passed
├── ClientGoneError            499                         the client closed the connection
└── NodeFailedError            502 server_error            a node failed the request and no attempt is left
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
    status, type = 400, "invalid_request_error"
    code: str | None = None


class ModelNotFoundError(InvalidRequestError):
    status, code = 404, "model_not_found"


class AdapterError(InvalidRequestError):
    code = "bad_adapter"


class AuthenticationError(InvalidRequestError):
    status, type, code = 401, "authentication_error", "invalid_api_key"


class ScopeError(InvalidRequestError):
    status, type, code = 403, "permission_error", "insufficient_scope"


class BodyTooLargeError(InvalidRequestError):
    status, code = 413, "body_too_large"


class ConfigError(TandemError, ValueError):
    code = "bad_config"


class CheckpointError(ConfigError):
    code = "bad_checkpoint"


class HandshakeError(TandemError):
    """Two processes refuse each other. `field` names what differs, `ours` and `theirs` the two values."""

    code = "handshake_refused"

    def __init__(self, field: str, ours: object, theirs: object) -> None:
        super().__init__(f"handshake refused: {field} differs (ours {ours!r}, theirs {theirs!r})")
        self.field, self.ours, self.theirs = field, ours, theirs


class DecodeError(TandemError):
    code = "bad_message"


class GrantError(TandemError):
    code = "bad_grant"


class TransportError(TandemError):
    code = "transport_failed"


class PeerLostError(TransportError):
    code = "peer_lost"


class OverloadedError(TandemError):
    status, type, code = 429, "rate_limit_error", "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, request_id: str | None = None) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    code = "rate_limit_exceeded"


class UnavailableError(TandemError):
    status, type, code = 503, "service_unavailable", "unavailable"
    retry_after_s = 5.0  # a guess: by then a process that ended runs again, and a lost node is replaced


class NoNodeError(UnavailableError):
    pass


class DeadlineError(TandemError):
    status, type, code = 504, "timeout", "deadline_exceeded"


class ClientGoneError(TandemError):
    status, type, code = 499, "client_closed_request", "client_gone"


class NodeFailedError(TandemError):
    status, type, code = 502, "server_error", "node_failed"
