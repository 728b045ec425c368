"""Keys files: who gets in, as which tenant, and what a file that is wrong is told."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from documented import blocks

from tandem.engine.contracts.errors import AuthenticationError, ConfigError, ScopeError
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.router.access.api_keys import ANYBODY, EVERYBODY, ApiKeys, Caller, Tenant
from tandem.router.access.keys_file import KeyLimits, Scope

KEYS = ClusterKeys(b"a secret of a cluster", curve=True)


def opened(folder: Path, content: str, name: str = "keys.yaml") -> ApiKeys:
    path = folder / name
    path.write_text(content)
    return ApiKeys(str(path), KEYS.tenant_salt)


def caller(keys: ApiKeys, key: str, scheme: str = "Bearer", scope: Scope = "inference") -> Caller:
    return keys.check([(b"host", b"x"), (b"authorization", f"{scheme} {key}".encode())], scope)


def asks(keys: ApiKeys, key: str, scheme: str = "Bearer") -> Tenant:
    return caller(keys, key, scheme).tenant


def test_without_a_file_everybody_asks_as_nobody() -> None:
    assert ApiKeys("", KEYS.tenant_salt).check([]) is ANYBODY
    assert EVERYBODY.salt == b""


def test_lines_are_keys_without_tenants(tmp_path: Path) -> None:
    hashed = hashlib.sha256(b"second").hexdigest()
    keys = opened(tmp_path, f"# comment\n first \n\nsha256:{hashed}\nwith:colon\n", "keys")
    for key in ("first", "second", "with:colon"):
        assert asks(keys, key) is EVERYBODY
        assert asks(keys, key, "bearer") is EVERYBODY
    for key in ("", "First", "firs", "third", hashed, f"sha256:{hashed}"):
        with pytest.raises(AuthenticationError):
            asks(keys, key)
    with pytest.raises(AuthenticationError):
        asks(keys, "first", "Basic")
    with pytest.raises(AuthenticationError):
        keys.check([])


def test_the_file_that_the_page_of_keys_shows_is_one(tmp_path: Path) -> None:
    (block,) = blocks("yaml", "docs/keys.md")
    digest = hashlib.sha256(b"test").hexdigest()
    assert f"sha256:{digest[:8]}…" in block.text
    keys = opened(tmp_path, block.text.replace(f"{digest[:8]}…", digest))
    whole, narrow = caller(keys, "sk-4f…"), caller(keys, "test")
    assert (whole.tenant.name, whole.limits) == ("acme", KeyLimits(requests_per_minute=60))
    assert (narrow.tenant.name, narrow.limits) == ("globex", KeyLimits(600, 200_000, 16))
    assert narrow.tenant.targets == Targets(ttft_s=0.5)
    assert keys.public_prefixes == ["You are a helpful assistant of …"]
    with pytest.raises(ScopeError):
        caller(keys, "test", scope="admin")


@pytest.mark.parametrize("name", ["keys.yaml", "keys.yml", "keys.json", "keys.txt", "keys"])
def test_keys_map_to_tenants_whose_salts_are_apart(tmp_path: Path, name: str) -> None:
    hashed = "sha256:" + hashlib.sha256(b"three").hexdigest()
    keys = opened(tmp_path, json.dumps({"one": "acme", "two": "acme", hashed: "globex"}), name)
    one, two, three = (asks(keys, key) for key in ("one", "two", "three"))
    assert one == two == Tenant("acme", KEYS.tenant_salt("acme"))
    assert three.name == "globex"
    assert len({one.salt, three.salt, b""}) == 3
    assert len(one.salt) == len(three.salt) == 16
    with pytest.raises(AuthenticationError):
        asks(keys, "acme")


def test_salts_are_equal_in_all_routers_and_differ_between_clusters() -> None:
    assert KEYS.tenant_salt("acme") == ClusterKeys(KEYS.secret, curve=True).tenant_salt("acme")
    assert KEYS.tenant_salt("acme") != ClusterKeys(b"another cluster's secret", curve=True).tenant_salt("acme")


def test_cache_salts_narrow_a_tenant_and_keep_its_name() -> None:
    acme, globex = (Tenant(name, KEYS.tenant_salt(name)) for name in ("acme", "globex"))
    salts = [tenant.salt_for(salt) for tenant in (acme, globex, EVERYBODY) for salt in ("", "a", "b")]
    assert len(set(salts)) == 9
    assert {salt[:16] for salt in salts[:3]} == {acme.salt}
    assert EVERYBODY.salt_for("") == b""
    # Nobody reaches a tenant's blocks by naming its salt: a cache_salt only ever follows 16 bytes that are not its own.
    assert EVERYBODY.salt_for(acme.salt.hex())[:16] == bytes(16)


def test_sections(tmp_path: Path) -> None:
    text = """
    keys: {one: acme, two: globex}
    tenants: {acme: {cache_share: 0.25, ttft_target_ms: 500, itl_max_ms: 40}}
    public_prefixes: ["You are kind.", [1, 2, 3]]
    """
    keys = opened(tmp_path, text)
    assert asks(keys, "one").cache_share == 0.25
    assert asks(keys, "two").cache_share == 1.0
    assert asks(keys, "one").targets == Targets(ttft_s=0.5, itl_max_s=0.04)
    assert asks(keys, "two").targets == NO_TARGETS
    assert keys.public_prefixes == ["You are kind.", [1, 2, 3]]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must map"),
        ("[one, two]", "must map"),
        ("{}", "holds no key"),
        ("a: {", "can't be parsed"),
        ("123: acme", "in quotes"),
        ("one:", r"got `null`"),
        ("one: 5", r"got `int`"),
        ("one: ''", "length >= 1"),
        ("sha256:abc: acme", "no SHA-256"),
        (f"one: acme\nsha256:{hashlib.sha256(b'one').hexdigest()}: globex", "stands there twice, of 'acme'"),
        ("keys: {one: acme}\nlimit: {}", "unknown field `limit`"),
        ("keys: {one: {scopes: [admin, root]}}", "Invalid enum value 'root'"),
        ("keys: {one: {limits: {requests_per_minute: 0}}}", "int` >= 1"),
        ("limits: {requests_per_minute: 1}", "unknown field"),
        ("keys: {one: acme}\ntenants: {acme: {tpot_target_ms: 0}}", "float` > 0"),
        ("keys: {one: acme}\ntenants: {acne: {}}", "no key belongs to the tenant 'acne'"),
        ("keys: {one: acme}\ntenants: {acme: {share: 1}}", "unknown field `share`"),
        ("keys: {one: acme}\ntenants: {acme: {cache_share: 1.5}}", "float` <= 1.0"),
        ("keys: {one: acme}\npublic_prefixes: [[1, -2]]", "int` >= 0"),
        ("keys: {one: acme}\npublic_prefixes: ['']", "length >= 1"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        opened(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "line"),
    [("sk-one\nsk-two: acme\n", 2), ("sk-one: acme\nsk-two\n", 1), ("# keys\n- sk-one\n", 2), ("sk-one acme", 1)],
)
def test_a_line_that_no_client_can_send_is_no_key(tmp_path: Path, text: str, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"line {line} is no key: write one key a line") as caught:
        opened(tmp_path, text, "keys.txt")
    assert "sk-" not in caught.value.message.replace(str(tmp_path), ""), "no secret in a message"


# README says: "asks every client for that key"
def test_one_key_without_a_file() -> None:
    keys = ApiKeys("", KEYS.tenant_salt, "sk-one")
    assert asks(keys, "sk-one") is EVERYBODY
    with pytest.raises(AuthenticationError):
        asks(keys, "sk-two")
    with pytest.raises(ConfigError, match="both given"):
        ApiKeys("keys", KEYS.tenant_salt, "sk-one")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read"):
        ApiKeys(str(tmp_path / "none"), KEYS.tenant_salt)


def test_scopes_and_limits(tmp_path: Path) -> None:
    text = """
    keys:
      one: acme
      two: {tenant: acme, scopes: [inference], limits: {concurrent_requests: 2}}
      three: {scopes: [admin]}
    limits: {requests_per_minute: 60, tokens_per_minute: 1000}
    """
    keys = opened(tmp_path, text)
    assert caller(keys, "one", scope="admin").limits == KeyLimits(60, 1000)
    assert caller(keys, "two").limits == KeyLimits(None, None, 2)
    assert (caller(keys, "two").tenant, caller(keys, "three", scope="admin").tenant) == (asks(keys, "one"), EVERYBODY)
    for key, scope in (("two", "admin"), ("three", "inference")):
        with pytest.raises(ScopeError, match=scope):
            caller(keys, key, scope=scope)  # type: ignore[arg-type]
    assert "one" not in str(caller(keys, "one"))
    assert str(caller(keys, "one")) == f"key {hashlib.sha256(b'one').hexdigest()[:12]} of acme"


# README says: "It is read again when it changes"
def test_a_file_that_changes_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = opened(tmp_path, "one: acme")
    path = tmp_path / "keys.yaml"
    # Each of another length: the clock of a file system may stand still between two.
    for content, known in (
        ("second: acme", "second"),
        ("second: {", "second"),
        ("", "second"),
        ("third: acme", "third"),
    ):
        path.write_text(content)
        keys.reload()
        keys.reload()
        assert asks(keys, known).name == "acme"
        with pytest.raises(AuthenticationError):
            asks(keys, "one")
    path.unlink()
    keys.reload()
    assert asks(keys, "third").name == "acme"
    said = [record.levelname for record in caplog.records if record.levelname == "ERROR"]
    assert len(said) == 3, "a file that is wrong is named once"
