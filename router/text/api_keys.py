"""Who may ask: API keys, the tenants behind them, and what prompts of all tenants may share (docs/security.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import AuthenticationError, ConfigError
from tandem.engine.contracts.hashing import TENANT_BYTES

Headers = Iterable[tuple[bytes, bytes]]

HASHED = "sha256:"
YAML_SUFFIXES = (".yaml", ".yml", ".json")  # others are YAML, too, when they read as a mapping
SECTIONS = {"keys", "tenants", "public_prefixes"}


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` enters the hashes of the tenant's blocks: b"" or 16 bytes that no client knows."""

    name: str = ""
    salt: bytes = b""
    cache_share: float = 1.0  # of each node's pool and tiers

    def salt_for(self, cache_salt: str) -> bytes:
        """The tenant's salt, narrowed further to requests that bring the same `cache_salt`."""
        if not cache_salt:
            return self.salt
        return (self.salt or bytes(TENANT_BYTES)) + hashlib.sha256(cache_salt.encode()).digest()[:TENANT_BYTES]


EVERYBODY = Tenant()


@dataclass
class _Content:
    """What a keys file says; `tenant_of_key` by SHA-256 of the key."""

    tenant_of_key: dict[bytes, str] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    public_prefixes: list[str | list[int]] = field(default_factory=list)


class ApiKeys:
    """Bearer keys of a file, or one `key`. Without either everybody may ask, as one tenant without a salt.

    `salt_of` makes a tenant's salt of its name, equal in every router. ConfigError: the file can't be read or used, or
    both are given.
    """

    def __init__(self, path: str, salt_of: Callable[[str], bytes], key: str = "") -> None:
        if path and key:
            raise ConfigError("--api-key and --api-keys-file are both given: add the key to the file")
        content = _read(path) if path else _Content({_digest("--api-key", key): ""} if key else {})
        self.public_prefixes = content.public_prefixes
        self._tenant_of_key = {
            digest: Tenant(name, salt_of(name), content.shares.get(name, 1.0)) if name else EVERYBODY
            for digest, name in content.tenant_of_key.items()
        }

    @classmethod
    def of(cls, options: RouterOptions, salt_of: Callable[[str], bytes]) -> ApiKeys:
        return cls(options.api_keys_file, salt_of, options.api_key)

    def check(self, headers: Headers) -> Tenant:
        """Raises AuthenticationError. Keys are looked up by digest: how long that takes says nothing about a key."""
        if not self._tenant_of_key:
            return EVERYBODY
        given = next((value for name, value in headers if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        tenant = self._tenant_of_key.get(hashlib.sha256(key.strip()).digest())
        if scheme.lower() != b"bearer" or tenant is None:
            raise AuthenticationError("give a valid API key as `Authorization: Bearer …`")
        return tenant


def _read(path: str) -> _Content:
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the API keys file {path}: {error.strerror}") from error
    content = _from_yaml(path, raw) if path.endswith(YAML_SUFFIXES) or _is_mapping(raw) else _from_lines(path, raw)
    if not content.tenant_of_key:
        raise ConfigError(f"the API keys file {path} holds no key; write one a line, or `key: tenant` as YAML")
    return content


def _is_mapping(raw: bytes) -> bool:
    try:
        return isinstance(yaml.safe_load(raw), dict)
    except (yaml.YAMLError, ValueError):
        return False


def _from_lines(path: str, raw: bytes) -> _Content:
    """One key a line, no tenants. A key that no client can send, since it holds white space, is a line of YAML."""
    content = _Content()
    for number, line in enumerate(raw.splitlines(), start=1):
        key = line.strip()
        if not key or key.startswith(b"#"):
            continue
        if len(key.split()) > 1 or key.endswith(b":"):
            raise ConfigError(
                f"{path}, line {number} is no key: write one key a line and nothing else, or make every line "
                "`key: tenant` (docs/security.md)"
            )
        content.tenant_of_key[_digest(path, key)] = ""
    return content


def _from_yaml(path: str, raw: bytes) -> _Content:
    """`key: tenant` for each key; or sections, of which one, `keys`, is that."""
    try:
        found = json.loads(raw) if path.endswith(".json") else yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"the API keys file {path} can't be parsed: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the API keys file {path} must map keys to tenants: `sk-…: acme`")
    sections: dict[str, Any] = found if isinstance(found.get("keys"), dict) else {"keys": found}
    for unknown in sections.keys() - SECTIONS:
        raise ConfigError(f"{path}: unknown section {unknown!r}; there are {', '.join(sorted(SECTIONS))}")
    content = _Content()
    for key, given in sections["keys"].items():
        digest, name = _digest(path, key), _tenant(path, given)
        if content.tenant_of_key.setdefault(digest, name) != name:
            raise ConfigError(f"{path}: one key belongs to {content.tenant_of_key[digest]!r} and to {name!r}")
    names = set(content.tenant_of_key.values())
    for name, settings in _mapping(path, "tenants", sections.get("tenants")).items():
        if name not in names:
            raise ConfigError(f"{path}: no key belongs to the tenant {name!r}; add one or take the tenant out")
        content.shares[name] = _share(path, name, settings)
    content.public_prefixes = [_prefix(path, one) for one in sections.get("public_prefixes") or []]
    return content


def _digest(path: str, key: object) -> bytes:
    """SHA-256 of a key that is given plainly (str, or bytes out of a file of lines) or as `sha256:<hex>`."""
    if isinstance(key, bytes) and not key.startswith(HASHED.encode()):
        return hashlib.sha256(key).digest()
    text = key.decode(errors="replace") if isinstance(key, bytes) else key
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{path}: the key {key!r} must be text; put it in quotes")
    if not text.startswith(HASHED):
        return hashlib.sha256(text.encode()).digest()
    try:
        digest = bytes.fromhex(text.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigError(f"{path}: {text[:16]}… is no SHA-256; make one with `printf %s KEY | sha256sum`")
    return digest


def _tenant(path: str, name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{path}: a key has the tenant {name!r}; give it a name")
    return name


def _mapping(path: str, section: str, found: object) -> dict[str, Any]:
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {section} must map names to settings")
    return found


def _share(path: str, name: str, settings: object) -> float:
    settings = _mapping(path, f"tenants.{name}", settings)
    for unknown in settings.keys() - {"cache_share"}:
        raise ConfigError(f"{path}: the tenant {name!r} has the unknown setting {unknown!r}; there is cache_share")
    share = settings.get("cache_share", 1.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ConfigError(f"{path}: cache_share of {name!r} is {share!r}; it must lie between 0 and 1")
    return float(share)


def _prefix(path: str, prefix: Any) -> str | list[int]:
    if isinstance(prefix, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prefix):
        return prefix
    if isinstance(prefix, str) and prefix:
        return prefix
    raise ConfigError(f"{path}: each of public_prefixes must be a text or a list of token ids")
