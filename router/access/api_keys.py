"""Who may ask: API keys, the tenants behind them, and what prompts of all tenants may share (docs/keys.md)."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import AuthenticationError, ConfigError, ScopeError
from tandem.engine.contracts.hashing import TENANT_BYTES
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.router.access.keys_file import KeyEntry, KeyLimits, KeysFile, Scope, TenantEntry, digest_of, read_keys_file

logger = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of this cluster. `salt` enters the hashes of its blocks: b"" or 16 bytes that no client knows."""

    name: str = ""
    salt: bytes = b""
    cache_share: float = 1.0  # share of each node's pool and tiers that the tenant may fill
    targets: Targets = NO_TARGETS  # what it is promised, unless a request brings its own

    def salt_for(self, cache_salt: str) -> bytes:
        """The tenant's salt, narrowed further to requests that bring the same `cache_salt`."""
        if not cache_salt:
            return self.salt
        return (self.salt or bytes(TENANT_BYTES)) + hashlib.sha256(cache_salt.encode()).digest()[:TENANT_BYTES]


EVERYBODY = Tenant()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent a key. Logs and Redis know it by `name`, a part of the key's digest."""

    tenant: Tenant = EVERYBODY
    name: str = "nobody"
    scopes: frozenset[Scope] = frozenset({"inference", "admin"})
    limits: KeyLimits | None = None

    def __str__(self) -> str:
        return f"key {self.name}" + (f" of {self.tenant.name}" if self.tenant.name else "")


ANYBODY = Caller()


class ApiKeys:
    """Bearer keys of a file, or one `key`. Without either everybody may ask, as one tenant without a salt.

    `salt_of` makes a tenant's salt of its name, equal in every router. Raises ConfigError when the file can't be read
    or used, and when both are given.
    """

    def __init__(self, path: str, salt_of: Callable[[str], bytes], key: str = "") -> None:
        if path and key:
            raise ConfigError("--api-key and --api-keys-file are both given: add the key to the file")
        self._path, self._salt_of = path, salt_of
        self._version = _version_of(path)
        content = read_keys_file(path) if path else KeysFile({key: KeyEntry()} if key else {})
        self.public_prefixes: list[str | list[int]] = content.public_prefixes or []
        self._callers = self._callers_of(content)

    @classmethod
    def of(cls, options: RouterOptions, salt_of: Callable[[str], bytes]) -> ApiKeys:
        return cls(options.api_keys_file, salt_of, options.api_key)

    def reload(self) -> None:
        """Reads the file again if it has changed. A file that is wrong is logged and changes nothing. Public prefixes
        stay as they were at the start, since what is cached was hashed with them."""
        version = _version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._callers = self._callers_of(read_keys_file(self._path))
        except ConfigError as error:
            logger.error("the keys stay as they were: %s", error.message)
            return
        logger.info("%d API keys are read anew from %s", len(self._callers), self._path)

    def check(self, headers: Headers, scope: Scope = "inference") -> Caller:
        """The caller whose key `headers` bring. Raises AuthenticationError, or ScopeError when the key lacks
        `scope`. Keys are looked up by digest, so that how long it takes says nothing about a key."""
        if not self._callers:
            return ANYBODY
        given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        caller = self._callers.get(hashlib.sha256(key.strip()).digest())
        if scheme.lower() != b"bearer" or caller is None:
            raise AuthenticationError("give a valid API key as `Authorization: Bearer …`")
        if scope not in caller.scopes:
            raise ScopeError(f"this API key may not do that: it lacks the scope {scope!r}")
        return caller

    def _callers_of(self, content: KeysFile) -> dict[bytes, Caller]:
        entries: dict[bytes, KeyEntry] = {}
        for key, given in content.keys.items():
            entry = KeyEntry(given) if isinstance(given, str) else given
            if entries.setdefault(digest := digest_of(key, self._path or "--api-key"), entry) != entry:
                raise ConfigError(f"{self._path}: one key stands there twice, of {entries[digest].tenant!r} first")
        names = {entry.tenant for entry in entries.values()}
        settings = {name: entry or TenantEntry() for name, entry in (content.tenants or {}).items()}
        for name in settings.keys() - names:
            raise ConfigError(f"{self._path}: no key belongs to the tenant {name!r}; add one or take the tenant out")
        tenants = {name: self._tenant(name, settings.get(name, TenantEntry())) for name in names if name}
        return {
            digest: Caller(
                tenants.get(entry.tenant, EVERYBODY),
                digest.hex()[:12],
                frozenset(entry.scopes),
                entry.limits or content.limits,
            )
            for digest, entry in entries.items()
        }

    def _tenant(self, name: str, settings: TenantEntry) -> Tenant:
        return Tenant(name, self._salt_of(name), settings.cache_share, settings.targets)


def _version_of(path: str) -> tuple[int, ...]:
    """A value that changes with the file's content; () when there is no file."""
    try:
        found = os.stat(path) if path else None
    except OSError:
        return ()
    return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
