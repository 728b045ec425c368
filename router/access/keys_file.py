"""What an API keys file says (docs/keys.md): one key a line, or YAML."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import TargetMs, Targets

HASHED = "sha256:"
YAML_SUFFIXES = (".yaml", ".yml", ".json")  # others are YAML, too, when they read as a mapping

Scope = Literal["inference", "admin"]
Name = Annotated[str, Meta(min_length=1)]
PerMinute = Annotated[int, Meta(ge=1, lt=1 << 40)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much one key may have; None: unlimited."""

    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None  # of prompts and output
    concurrent_requests: PerMinute | None = None


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key: its tenant ("" for none), what it may do, how much."""

    tenant: str = ""
    scopes: tuple[Scope, ...] = ("inference", "admin")
    limits: KeyLimits | None = None  # None: the file's


class TenantEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tenant: the part of a node's blocks that it may hold, and what it is promised, in place of what all are."""

    cache_share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    ttft_target_ms: TargetMs | None = None
    tpot_target_ms: TargetMs | None = None
    itl_max_ms: TargetMs | None = None

    @property
    def targets(self) -> Targets:
        return Targets.of_milliseconds(self.ttft_target_ms, self.tpot_target_ms, self.itl_max_ms)


class KeysFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of a keys file. `public_prefixes`, texts or token ids, are cached for all tenants alike."""

    keys: dict[Name, Name | KeyEntry]
    tenants: dict[Name, TenantEntry | None] | None = None
    limits: KeyLimits | None = None  # limits of each key that has none of its own
    public_prefixes: list[Name | list[TokenId]] | None = None


def read_keys_file(path: str) -> KeysFile:
    """Reads an API keys file. Raises ConfigError that says where the file is wrong, and repeats no key."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read the API keys file {path}: {error.strerror}") from error
    content = _from_yaml(path, raw) if path.endswith(YAML_SUFFIXES) or _is_mapping(raw) else _from_lines(path, raw)
    if not content.keys:
        raise ConfigError(f"the API keys file {path} holds no key; write one a line, or `key: tenant` as YAML")
    return content


def digest_of(key: str, path: str = "--api-key") -> bytes:
    """SHA-256 of a key that is given plainly or as `sha256:<hex>`. Raises ConfigError."""
    if not key.startswith(HASHED):
        return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(HASHED))
    except ValueError:
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ConfigError(f"{path}: {key[:16]}… is no SHA-256; make one with `tandem hash-key`")
    return digest


def _is_mapping(raw: bytes) -> bool:
    try:
        return isinstance(yaml.safe_load(raw), dict)
    except (yaml.YAMLError, ValueError):
        return False


def _from_lines(path: str, raw: bytes) -> KeysFile:
    """A file of one key a line, without tenants. Raises ConfigError for a line with white space: no key holds any."""
    keys: dict[str, str | KeyEntry] = {}
    for number, line in enumerate(raw.splitlines(), start=1):
        key = line.strip().decode(errors="surrogateescape")
        if not key or key.startswith("#"):
            continue
        if len(key.split()) > 1 or key.endswith(":"):
            raise ConfigError(
                f"{path}, line {number} is no key: write one key a line and nothing else, or make every line "
                "`key: tenant` (docs/keys.md)"
            )
        keys[key] = KeyEntry()
    return KeysFile(keys)


def _from_yaml(path: str, raw: bytes) -> KeysFile:
    """`key: tenant` for each key; or sections, of which one, `keys`, is that."""
    try:
        found = json.loads(raw) if path.endswith(".json") else yaml.safe_load(raw)
    except (yaml.YAMLError, ValueError) as error:
        where = getattr(error, "problem_mark", None) or error
        raise ConfigError(f"the API keys file {path} can't be parsed: {str(where).strip()}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the API keys file {path} must map keys to tenants: `sk-…: acme`")
    sections: dict[str, Any] = found if isinstance(found.get("keys"), dict) else {"keys": found}
    try:
        return msgspec.convert(sections, KeysFile)
    except msgspec.ValidationError as error:
        hint = "; a key and a tenant are text: put numbers in quotes" if "Expected `str" in str(error) else ""
        place = re.sub(r" - at (?:`key` in )?`\$\.?(.*)`", r" (at \1)", str(error))
        raise ConfigError(f"{path}: {place}{hint} (docs/keys.md)") from None
