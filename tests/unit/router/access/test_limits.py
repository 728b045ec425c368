"""Limits of keys: the same in one process and over Redis, and what HTTP says when one is reached."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis_servers import running_cluster, running_with_users
from router_in_thread import VOCAB_SIZE, RouterInThread
from waiting import PATIENCE_S, wait_until

from redis_process import RedisProcess, running_redis
from stand_in_node import StandInNode
from tandem.engine.contracts.errors import RateLimitError
from tandem.router.access.api_keys import Caller
from tandem.router.access.keys_file import KeyLimits
from tandem.router.access.limits import LocalLimits, Permit, RequestLimits
from tandem.router.access.shared_limits import SharedLimits
from tandem.router.process.worker import Sources

DOCS = Path(__file__).resolve().parents[4] / "docs"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that is late counts as one that is away."""
    monkeypatch.setattr("tandem.router.access.shared_limits.IO_TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisProcess]:
    with running_redis() as server:
        yield server


def documented_rights() -> str:
    """The rights that docs/directory.md and docs/keys.md ask for, of a user with the namespace `tandem`."""
    directory, keys = (" ".join((DOCS / f"{name}.md").read_text().split()) for name in ("directory", "keys"))
    user = re.search(r"user tandem on >PASSWORD (resetkeys [^`]*?) ```", directory)
    scripts, cluster = re.search(r"`(\+eval [^`]*)`", keys), re.search(r"in a Redis Cluster also `([^`]*)`", directory)
    assert user is not None
    assert scripts is not None
    assert cluster is not None
    return f"{user[1]} {scripts[1]} {cluster[1]}"


@pytest.fixture(scope="module")
def urls(redis: RedisProcess) -> Iterator[dict[str, str]]:
    """One Redis for everything; a user with few rights; a Redis Cluster, where a script's keys must lie in one slot."""
    rights = documented_rights()
    with running_with_users([f"user tandem on >secret {rights}"]) as server, running_cluster(rights, 1) as cluster:
        yield {"shared": redis.url, "rights": f"redis://tandem:secret@127.0.0.1:{server.port}", "cluster": cluster.url}


@pytest.fixture(params=["local", "shared", "rights", "cluster"])
async def limits(
    request: pytest.FixtureRequest, urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RequestLimits]:
    if request.param == "local":
        yield LocalLimits()
        return
    shared = SharedLimits(urls[request.param], f"tandem:{random.getrandbits(32)}", PATIENCE_S)
    monkeypatch.setattr(shared, "_local", None)  # nothing may be counted in this process, as without Redis
    yield shared
    await shared.close()


def permit(number: int, name: str = "k") -> Permit:
    return Permit(Caller(name=name), str(number))


async def refused(limits: RequestLimits, number: int, given: KeyLimits) -> float:
    with pytest.raises(RateLimitError) as caught:
        await limits.enter(permit(number), given)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


async def test_requests_a_minute(limits: RequestLimits) -> None:
    given = KeyLimits(requests_per_minute=2)
    for number in range(2):
        await limits.enter(permit(number), given)
        await limits.leave(permit(number), given)
    assert 0 < await refused(limits, 3, given) <= 30
    await limits.enter(permit(3, "another"), given)


async def test_requests_at_a_time(limits: RequestLimits) -> None:
    given = KeyLimits(concurrent_requests=2)
    for number in range(2):
        await limits.enter(permit(number), given)
    await refused(limits, 3, given)
    await limits.leave(permit(0), given)
    await limits.enter(permit(3), given)
    await refused(limits, 4, given)


async def test_tokens_are_charged_when_they_are_known(limits: RequestLimits) -> None:
    given = KeyLimits(tokens_per_minute=60)
    first = permit(1)
    await limits.enter(first, given)
    await limits.enter(permit(2), given)
    first.charge(180)
    await limits.leave(first, given)
    assert 60 < await refused(limits, 3, given) <= 121


async def test_what_a_minute_allows_comes_back_evenly() -> None:
    now = 0.0
    limits, given = LocalLimits(lambda: now), KeyLimits(requests_per_minute=6, tokens_per_minute=60)
    for number in range(6):
        await limits.enter(permit(number), given)
    assert await refused(limits, 7, given) == pytest.approx(10)
    now = 10.001
    await limits.enter(permit(7), given)
    assert await refused(limits, 8, given) == pytest.approx(10, abs=0.01)
    now = 1e6
    for number in range(9, 15):
        await limits.enter(permit(number), given)
    await refused(limits, 15, given)


async def test_routers_share_what_redis_counts(redis: RedisProcess) -> None:
    given, namespace = KeyLimits(concurrent_requests=1), f"t{random.getrandbits(32)}"
    one, two = (SharedLimits(redis.url, namespace, PATIENCE_S) for _ in range(2))
    await one.enter(permit(1), given)
    await refused(two, 2, given)
    await one.leave(permit(1), given)
    await two.enter(permit(2), given)
    for shared in (one, two):
        await shared.close()


async def test_requests_of_a_dead_router_end_by_themselves(redis: RedisProcess) -> None:
    given, namespace = KeyLimits(concurrent_requests=1), f"t{random.getrandbits(32)}"
    dead, other = SharedLimits(redis.url, namespace, 0.01), SharedLimits(redis.url, namespace, PATIENCE_S)
    await dead.enter(permit(1), given)
    await dead.close()
    while True:
        try:
            await other.enter(permit(2), given)
            break
        except RateLimitError:
            await asyncio.sleep(0.005)
    await other.close()


async def test_without_redis_each_process_counts_alone() -> None:
    given, alone = KeyLimits(concurrent_requests=1), SharedLimits("redis://127.0.0.1:1", "t", PATIENCE_S)
    await alone.enter(permit(1), given)
    await refused(alone, 2, given)
    await alone.leave(permit(1), given)
    await alone.enter(permit(2), given)
    await alone.close()


KEYS = """
keys:
  slow: {tenant: acme, limits: {requests_per_minute: 2}}
  busy: {limits: {concurrent_requests: 1, tokens_per_minute: 20}}
  user: {scopes: [inference]}
  boss: {scopes: [inference, admin]}
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return path


# README says: "429 with Retry-After once it is used up"
def test_over_http(folder: Path, keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tandem")
    node = StandInNode(vocab_size=VOCAB_SIZE).start()
    with RouterInThread(folder, (node.address,), api_keys_file=str(keys_file)) as router:
        router.wait_ready()

        def ask(key: str, path: str = "/v1/completions", **body: object) -> tuple[int, str | None, str]:
            answer = router.client.post(
                path, json={"prompt": [5] * 10, **body}, headers={"Authorization": f"Bearer {key}"}
            )
            return answer.status_code, answer.headers.get("retry-after"), answer.text

        assert [ask("slow")[0] for _ in range(3)] == [200, 200, 429]
        status, after, text = ask("slow", stream=True)
        assert (status, '"rate_limit_exceeded"' in text, 1 <= int(after or 0) <= 30) == (429, True, True)
        assert ask("busy", max_tokens=16, stream=True)[0] == 200
        assert ask("busy")[0] == 429  # 26 tokens of 20
        assert ask("user")[0] == 200
        assert ask("user", "/explain")[0] == 403
        assert ask("boss", "/explain")[0] == 200
        said = [record.getMessage() for record in caplog.records if record.name == "tandem.audit"]
        assert [line.partition(":")[0] for line in said] == ["POST /explain"] * 2
        assert "lacks the scope 'admin'" in said[0]
        assert "by key" in said[1]
    node.stop()


def test_a_client_that_leaves_gives_its_place_back(folder: Path, keys_file: Path, redis: RedisProcess) -> None:
    node = StandInNode(vocab_size=VOCAB_SIZE, hold_tokens=True).start()
    shared = SharedLimits(redis.url, "limits", PATIENCE_S)
    with RouterInThread(folder, (node.address,), Sources(limits=shared), api_keys_file=str(keys_file)) as router:
        router.wait_ready()
        running = f"limits:{{{hashlib.sha256(b'busy').hexdigest()[:12]}}}:running"
        headers, body = {"Authorization": "Bearer busy"}, {"prompt": "a", "stream": True}
        for _ in range(2):
            with pytest.raises(Exception, match="timed out"):
                router.client.post("/v1/completions", json=body, headers=headers, timeout=0.5)
            router.wait_idle()
            wait_until(lambda: not redis.client().zcard(running), "the key's place to be free")
    node.stop()
