"""The directory on a Redis Cluster, behind sentinels, over TLS, as a user with few rights. All servers are real."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import redis
import waiting
from redis_servers import Cluster, running_cluster, running_sentinels, running_with_users
from redis_tls import make_certificates, running_redis_with_tls

from tandem.deploy.redis_server import free_port
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.directory.publisher import PublisherTimes, RedisPublisher
from tandem.kv_connector.directory.reader import RedisDirectory
from tandem.kv_connector.directory.records import PUBLISHED, KeySpace, NodeRecord
from tandem.kv_connector.directory.servers import parse_redis_url

TIMES = PublisherTimes(heartbeat_s=0.2, lease_s=10.0, io_timeout_s=2.0)
# What docs/directory.md tells to grant.
ACL_RIGHTS = (
    "resetkeys ~prod:* resetchannels &prod:events -@all +get +mget +set +incrby +unlink +pexpire "
    "+sadd +srem +smembers +smismember +sscan +publish +subscribe +unsubscribe +multi +exec +ping +hello +select"
)
CLUSTER_RIGHTS = "+cluster|slots +command"


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


def stored(*numbers: int) -> list[BlockEvent]:
    return [BlockEvent(block_hash, True) for block_hash in hashes(*numbers)]


@contextlib.contextmanager
def publishing(url: str, *names: str, namespace: str = "prod") -> Iterator[list[RedisPublisher]]:
    with contextlib.ExitStack() as stack:
        publishers = []
        for epoch, name in enumerate(names, 1):
            record = NodeRecord(node_id=name, epoch=epoch, role="decode", control_address=f"tcp://127.0.0.1:{epoch}")
            publishers.append(RedisPublisher(url, namespace, record, TIMES))
            stack.callback(publishers[-1].close)
        yield publishers


@contextlib.asynccontextmanager
async def reading(url: str, namespace: str = "prod") -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(url, namespace, grace_s=30.0, io_timeout_s=2.0)
    directory.start()
    try:
        yield directory
    finally:
        await directory.close()


async def soon(condition: Callable[[], bool]) -> None:
    """A server that is asked by the condition may be on its way up."""

    def holds() -> bool:
        try:
            return condition()
        except redis.RedisError:
            return False

    await waiting.soon(holds)


# --- a cluster ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(f"{ACL_RIGHTS} {CLUSTER_RIGHTS}") as cluster:
        yield cluster


def nodes_on_each_server(cluster: Cluster) -> list[str]:
    """A node id for each server of the cluster, whose keys lie there."""
    names: dict[int, str] = {}
    for number in range(100):
        name = f"decode-{number}"
        names.setdefault(cluster.owner_of(KeySpace("prod").node(name)).port, name)
    return [names[server.port] for server in cluster.servers]


def test_all_keys_of_a_node_are_in_one_slot() -> None:
    keys, owner = KeySpace("prod"), NodeKey("decode-1", 5)
    own = [keys.node("decode-1"), keys.sequence(owner), *keys.all_blocks(owner)]
    assert len(own) == 2 + len(PUBLISHED)
    assert len({redis.crc.key_slot(key.encode()) for key in own}) == 1
    assert redis.crc.key_slot(keys.node("decode-2").encode()) != redis.crc.key_slot(own[0].encode())


async def test_nodes_on_all_servers_of_a_cluster_are_found_and_followed(cluster: Cluster) -> None:
    names = nodes_on_each_server(cluster)
    async with reading(cluster.url) as early:
        with publishing(cluster.url, *names) as publishers:
            for length, publisher in enumerate(publishers, 1):
                publisher.publish(stored(*range(length)))
            wanted = {(name, epoch): epoch for epoch, name in enumerate(names, 1)}
            await soon(lambda: early.longest_prefix(hashes(0, 1, 2, 3)) == wanted)
            for server, name in zip(cluster.servers, names, strict=True):
                found = {key.decode() for key in server.client().keys("*{*")}
                assert {key.split("}")[0] for key in found} == {f"prod:{{{name}"}
            async with reading(cluster.url) as late:
                await soon(lambda: late.longest_prefix(hashes(0, 1, 2, 3)) == wanted)
                publishers[0].publish(stored(1))
                for directory in (early, late):
                    await soon(lambda d=directory: d.longest_prefix(hashes(0, 1))[names[0], 1] == 2)
                assert late.mirror.num_gaps == early.mirror.num_gaps == 0
        await soon(lambda: early.longest_prefix(hashes(0)) == {})
    assert not any(server.client().keys() for server in cluster.servers)


async def test_a_server_of_a_cluster_that_comes_back_empty_is_filled_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    names = nodes_on_each_server(cluster)
    with publishing(cluster.url, *names) as publishers:
        for publisher in publishers:
            publisher.publish(stored(*range(100)))
        async with reading(cluster.url) as directory:
            await soon(lambda: len(directory.longest_prefix(hashes(*range(100)))) == 3)
            victim = cluster.owner_of(KeySpace("prod").node(names[1]))
            victim.kill()
            publishers[0].publish(stored(100))
            await soon(lambda: not directory.connected)
            await soon(lambda: "placement goes on" in caplog.text)
            await asyncio.sleep(0.5)
            assert len(directory.longest_prefix(hashes(*range(100)))) == 3, "what is known serves on"
            said = [each for each in caplog.messages if "placement goes on" in each]
            assert len(said) == len(set(said)), "the log says each thing once"
            victim.start()
            blocks = KeySpace("prod").blocks(NodeKey(names[1], 2), "gpu")
            await soon(lambda: victim.client().scard(blocks) == 100)
            publishers[1].publish(stored(100))
            both = {(names[0], 1): 101, (names[1], 2): 101, (names[2], 3): 100}
            await soon(lambda: directory.longest_prefix(hashes(*range(101))) == both)


# --- sentinels ------------------------------------------------------------------------------------------------------


# README says: "a cluster or watched by Sentinels"
async def test_a_failover_moves_the_directory_to_the_new_master() -> None:
    with running_sentinels() as watched, publishing(watched.url, "decode-1") as [publisher]:
        publisher.publish(stored(1, 2))
        async with reading(watched.url) as directory:
            await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {("decode-1", 1): 2})
            assert watched.pair[0].client().scard(KeySpace("prod").blocks(NodeKey("decode-1", 1), "gpu")) == 2
            watched.pair[0].kill()
            publisher.publish(stored(3))
            await soon(lambda: directory.longest_prefix(hashes(1, 2, 3)) == {("decode-1", 1): 3})
            assert watched.master_port() == watched.pair[1].port


# --- TLS and users --------------------------------------------------------------------------------------------------


# README says: "with TLS and ACL users"
@pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by the openssl command")
async def test_tls_with_certificates_of_an_own_ca(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_certificates(tmp_path)
    client = f"ssl_certfile={made.certificate('client')}&ssl_keyfile={made.key('client')}"
    with running_redis_with_tls(made) as place:
        url = f"rediss://{place}/0?ssl_ca_certs={made.ca}&{client}"
        async with reading(url) as directory:
            with publishing(url, "decode-1") as [publisher]:
                publisher.publish(stored(1, 2))
                await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {("decode-1", 1): 2})
        strangers = {
            "CERTIFICATE_VERIFY_FAILED": f"rediss://{place}/0?{client}",  # a CA that the machine doesn't know
            "": f"rediss://{place}/0?ssl_ca_certs={made.ca}",  # no certificate of its own
        }
        for complaint, wrong in strangers.items():
            caplog.clear()
            with caplog.at_level(logging.WARNING), publishing(wrong, "decode-2") as [publisher]:
                await soon(lambda: "no Redis" in caplog.text)
                assert complaint in caplog.text
                assert not publisher.counters()["directory_connected"]


async def test_a_user_with_rights_to_its_namespace_only(caplog: pytest.LogCaptureFixture) -> None:
    users = [f"user tandem on >secret {ACL_RIGHTS}", "user admin on >root ~* &* +@all"]
    with running_with_users(users) as server:
        url = f"redis://tandem:secret@127.0.0.1:{server.port}/0"
        async with reading(url) as directory:
            with publishing(url, "decode-1", "decode-2") as publishers:
                for publisher in publishers:
                    publisher.publish(stored(1, 2))
                await soon(lambda: len(directory.longest_prefix(hashes(1, 2))) == 2)
                publishers[0].publish([BlockEvent(hashes(2)[0], False)])
                await soon(lambda: directory.longest_prefix(hashes(1, 2))[("decode-1", 1)] == 1)
                async with reading(url) as late:
                    await soon(lambda: len(late.longest_prefix(hashes(1, 2))) == 2)
        admin = redis.Redis(port=server.port, username="admin", password="root")
        assert admin.keys() == []
        assert "NOPERM" not in caplog.text
        for wrong in (url.replace("secret", "guess"), f"redis://127.0.0.1:{server.port}/0"):
            caplog.clear()
            with publishing(wrong, "decode-1"):
                await soon(lambda: "no Redis" in caplog.text)
            assert "guess" not in caplog.text
        with publishing(url, "decode-1", namespace="other"):
            await soon(lambda: "permission" in caplog.text.lower())
        assert admin.keys() == []


# --- URLs -----------------------------------------------------------------------------------------------------------


def test_urls_of_one_server_keep_what_they_say() -> None:
    one = parse_redis_url("rediss://u:p%40@h:1/2?ssl_ca_certs=/ca")
    assert (one.kind, one.options["ssl"]) == ("single", True)
    assert one.options["ssl_ca_certs"] == "/ca"
    assert [one.options[name] for name in ("host", "port", "db", "username", "password")] == ["h", 1, 2, "u", "p@"]
    assert parse_redis_url("unix:///tmp/redis.sock?db=3").options == {"path": "/tmp/redis.sock", "db": 3} | {
        name: value
        for name, value in parse_redis_url("unix:///tmp/redis.sock").options.items()
        if name not in ("path", "db")
    }


def test_urls_of_clusters_and_sentinels() -> None:
    cluster = parse_redis_url("rediss+cluster://u:p@a:7000,b,[::1]:7002?ssl_ca_certs=/ca")
    assert (cluster.kind, cluster.hosts) == ("cluster", (("a", 7000), ("b", 6379), ("::1", 7002)))
    assert cluster.options == {"username": "u", "password": "p", "ssl": True, "ssl_ca_certs": "/ca"}
    watched = parse_redis_url("rediss+sentinel://:p@a,b:5000/my-service/4?sentinel_password=q&ssl_ca_certs=/ca")
    assert (watched.kind, watched.hosts, watched.service) == ("sentinel", (("a", 26379), ("b", 5000)), "my-service")
    assert watched.options == {"password": "p", "db": 4, "ssl": True, "ssl_ca_certs": "/ca"}
    assert watched.sentinel_options == {"password": "q", "ssl": True, "ssl_ca_certs": "/ca"}


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("localhost:6379", "must begin with"),
        ("http://localhost", "must begin with"),
        ("redis+sentinel://:hidden@a:1", "names no service"),
        ("redis+cluster://a,:7000", "names no host"),
        ("redis+cluster://a/3", "no database"),
        ("redis+cluster://a?sentinel_password=x", "redis\\+sentinel:// only"),
        ("redis://a:port/0", "can't be read"),
    ],
)
def test_urls_that_say_nothing_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        parse_redis_url(url)
    assert "hidden" not in caught.value.message


@pytest.mark.parametrize("namespace", ["", "a{b", "{a}"])
def test_namespaces_do_not_decide_about_slots(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        KeySpace(namespace)


# --- nobody there ---------------------------------------------------------------------------------------------------


async def test_a_redis_that_stays_away_is_said_again_and_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RateLimited.__init__, "__defaults__", (0.2, time.monotonic))
    url = f"redis://127.0.0.1:{free_port()}"

    def said(name: str) -> int:
        found = [record for record in caplog.records if record.name.endswith(name)]
        assert all("through Redis alone" in record.getMessage() for record in found)
        return len(found)

    with caplog.at_level(logging.WARNING), publishing(url, "decode-1"):
        async with reading(url):
            await soon(lambda: said("publisher") > 2 and said("reader") > 2)
