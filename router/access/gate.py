"""The gate that each HTTP request passes: it checks the key, what the key may do, and how much of it."""

from __future__ import annotations

import logging
import uuid

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.access.api_keys import ApiKeys, Caller, Headers
from tandem.router.access.limits import LocalLimits, Permit, RequestLimits

audit = logging.getLogger("tandem.audit")


class Gate:
    """Checks keys and their limits. `limits` counts for all routers of a cluster; None: for this process alone."""

    def __init__(self, keys: ApiKeys, limits: RequestLimits | None = None) -> None:
        self._keys, self._limits = keys, limits or LocalLimits()

    def check(self, headers: Headers) -> Caller:
        """The caller whose key this is. Raises AuthenticationError and ScopeError."""
        return self._keys.check(headers)

    def check_admin(self, headers: Headers, what: str) -> Caller:
        """The caller, when its key has the scope "admin". The audit log says who asked for `what`, or that it was
        refused. Raises AuthenticationError and ScopeError."""
        try:
            caller = self._keys.check(headers, "admin")
        except InvalidRequestError as error:
            audit.warning("%s: refused, %s", what, error.message)
            raise
        audit.info("%s: by %s", what, caller)
        return caller

    def is_admin(self, headers: Headers) -> bool:
        """Whether the key still has the scope "admin", for answers that go on for long. The audit log had it before."""
        try:
            self._keys.check(headers, "admin")
        except InvalidRequestError:
            return False
        return True

    async def enter(self, headers: Headers) -> Permit:
        """Counts a request until `leave`. Raises as `check` does, and RateLimitError."""
        caller = self._keys.check(headers)
        if caller.limits is None:
            return Permit(caller, "")
        permit = Permit(caller, uuid.uuid4().hex)
        await self._limits.enter(permit, caller.limits)
        return permit

    async def leave(self, permit: Permit) -> None:
        if permit.caller.limits is not None:
            await self._limits.leave(permit, permit.caller.limits)
