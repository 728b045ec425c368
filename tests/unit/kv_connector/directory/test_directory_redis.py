"""The directory's shells against a real redis-server: whole again after restarts, never in the node's way."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from waiting import PATIENCE_S, soon

from redis_process import RedisProcess, running_redis
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.publisher import PublisherTimes, RedisPublisher
from tandem.kv_connector.directory.reader import RedisDirectory
from tandem.kv_connector.directory.records import (
    Batch,
    KeySpace,
    NodeRecord,
    TierChange,
    decode_event,
    encode,
)

TIMES = PublisherTimes(heartbeat_s=0.2, lease_s=10.0, io_timeout_s=2.0)


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    with running_redis() as server:
        yield server


def hashes(*numbers: int) -> list[bytes]:
    return [struct.pack("<QQ", number, 5) for number in numbers]


def stored(*numbers: int, tier: str = "gpu") -> list[BlockEvent]:
    return [BlockEvent(block_hash, True, tier) for block_hash in hashes(*numbers)]


def removed(*numbers: int) -> list[BlockEvent]:
    return [BlockEvent(block_hash, False) for block_hash in hashes(*numbers)]


def record(node_id: str = "decode-1", epoch: int = 1) -> NodeRecord:
    return NodeRecord(node_id=node_id, epoch=epoch, role="decode", control_address=f"tcp://127.0.0.1:{1000 + epoch}")


@contextlib.contextmanager
def publishing(url: str, namespace: str = "t", of: NodeRecord | None = None) -> Iterator[RedisPublisher]:
    publisher = RedisPublisher(url, namespace, of or record(), TIMES)
    try:
        yield publisher
    finally:
        publisher.close()


@contextlib.asynccontextmanager
async def reading(
    url: str, namespace: str = "t", grace_s: float = 10.0, check_s: float = 5.0
) -> AsyncIterator[RedisDirectory]:
    directory = RedisDirectory(url, namespace, grace_s=grace_s, io_timeout_s=2.0, check_s=check_s)
    directory.start()
    try:
        yield directory
    finally:
        await directory.close()


async def test_published_blocks_reach_a_reader_that_was_there_and_one_that_comes_later(server: RedisProcess) -> None:
    async with reading(server.url) as early:
        with publishing(server.url) as publisher:
            publisher.publish(stored(1, 2, 3) + stored(4, tier="cpu"))
            await soon(lambda: early.longest_prefix(hashes(1, 2, 3, 4, 5)) == {("decode-1", 1): 4})
            publisher.publish(removed(3))
            await soon(lambda: early.longest_prefix(hashes(1, 2, 3)) == {("decode-1", 1): 2})
            async with reading(server.url) as late:
                await soon(lambda: late.longest_prefix(hashes(1, 2, 3)) == {("decode-1", 1): 2})
                publisher.publish(stored(3))
                await soon(lambda: late.longest_prefix(hashes(1, 2, 3)) == {("decode-1", 1): 3})
                assert late.num_snapshots == 1
                assert late.mirror.num_gaps == early.mirror.num_gaps == 0


async def test_a_large_view_arrives_whole_through_a_snapshot(server: RedisProcess) -> None:
    numbers = range(30_000)
    with publishing(server.url) as publisher:
        publisher.publish(stored(*numbers))
        await soon(lambda: server.client().scard(KeySpace("t").blocks(NodeKey("decode-1", 1), "gpu")) == len(numbers))
        async with reading(server.url) as directory:
            await soon(lambda: directory.longest_prefix(hashes(*numbers)) == {("decode-1", 1): len(numbers)})


async def test_watch_tells_of_nodes_that_come_leave_and_return(server: RedisProcess) -> None:
    async with reading(server.url) as directory:
        changes = directory.watch()

        async def next_change() -> tuple[bool, str]:
            change = await asyncio.wait_for(anext(changes), PATIENCE_S)
            return change.present, change.address

        with publishing(server.url):
            assert await next_change() == (True, "tcp://127.0.0.1:1001")
            with publishing(server.url, of=record("prefill-1", 7)):
                assert await next_change() == (True, "tcp://127.0.0.1:1007")
            assert await next_change() == (False, "tcp://127.0.0.1:1007")
            assert [node.node_id for node in directory.records()] == ["decode-1"]


async def test_a_node_started_again_under_another_name_keeps_its_address(server: RedisProcess) -> None:
    """What routers watch must not lose the address when the name that had it before expires."""
    async with reading(server.url) as directory:
        changes = directory.watch()
        with publishing(server.url, of=record("decode-new")):
            assert (await asyncio.wait_for(anext(changes), PATIENCE_S)).address == "tcp://127.0.0.1:1001"
            with publishing(server.url, of=record("decode-old")):
                await asyncio.wait_for(anext(changes), PATIENCE_S)
                await soon(lambda: len(directory.records()) == 2)
            await soon(lambda: len(directory.records()) == 1)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(changes), 0.5)


async def test_close_takes_the_records_out(server: RedisProcess) -> None:
    with publishing(server.url) as publisher:
        publisher.publish(stored(1))
        await soon(lambda: server.client().dbsize() == 4)
    assert server.client().keys() == []


async def test_everything_that_is_written_expires_with_its_node(server: RedisProcess) -> None:
    with publishing(server.url) as publisher:
        publisher.publish(stored(1) + stored(2, tier="cpu"))
        client, keys = server.client(), KeySpace("t")
        await soon(lambda: client.dbsize() == 5)
        for key in client.scan_iter():
            if key.decode() != keys.nodes:
                assert 0 < client.pttl(key) <= 1000 * TIMES.lease_s, key
        assert client.config_get("lazyfree-lazy-expire") == {"lazyfree-lazy-expire": "yes"}


async def test_an_emptied_and_restarted_redis_is_whole_again(server: RedisProcess) -> None:
    everything, owner = range(2_000), NodeKey("decode-1", 1)
    with publishing(server.url) as publisher:
        async with reading(server.url) as directory:
            publisher.publish(stored(*everything[:1_000]))
            await soon(lambda: directory.longest_prefix(hashes(*everything)) == {owner: 1_000})
            server.restart_empty()
            for number in everything[1_000:]:
                publisher.publish(stored(number))
            await soon(lambda: directory.longest_prefix(hashes(*everything)) == {owner: 2_000})
            await soon(lambda: server.client().scard(KeySpace("t").blocks(owner, "gpu")) == 2_000)
            assert [node.node_id for node in directory.records()] == ["decode-1"]


async def test_an_emptied_redis_is_noticed_without_a_lost_connection(server: RedisProcess) -> None:
    owner = NodeKey("decode-1", 1)
    with publishing(server.url) as publisher:
        client, key = server.client(), KeySpace("t").blocks(owner, "gpu")
        publisher.publish(stored(1, 2, 3))
        await soon(lambda: client.scard(key) == 3)
        client.flushall()
        await soon(lambda: client.scard(key) == 3)
        client.flushall()
        publisher.publish(stored(4))  # the next write, not the heartbeat, meets the emptied server
        await soon(lambda: client.scard(key) == 4)


class Lossy:
    """Between a reader and its stream: takes away the batch that tells of a block, not the one before, which the
    stream may bring after a snapshot has told of it."""

    def __init__(self, directory: RedisDirectory, number: int) -> None:
        self._take, self._block, self.has_lost = directory._take, hashes(number)[0], False
        directory._take = self  # type: ignore[method-assign, assignment]

    async def __call__(self, data: bytes) -> None:
        event = decode_event(data)
        if isinstance(event, Batch) and any(self._block in each.stored + each.removed for each in event.changes):
            self.has_lost = True
        else:
            await self._take(data)


async def test_a_lost_message_shows_as_a_gap_and_is_made_up_for_by_a_snapshot(server: RedisProcess) -> None:
    owner = NodeKey("decode-1", 1)
    async with reading(server.url, check_s=2 * PATIENCE_S) as directory:  # no check comes before the gap
        with publishing(server.url) as publisher:
            publisher.publish(stored(1))
            await soon(lambda: directory.longest_prefix(hashes(1, 2, 3)) == {owner: 1})
            lossy, num_snapshots = Lossy(directory, 2), directory.num_snapshots
            publisher.publish(stored(2))
            await soon(lambda: lossy.has_lost)
            assert directory.longest_prefix(hashes(1, 2, 3)) == {owner: 1}
            publisher.publish(stored(3))
            await soon(lambda: directory.longest_prefix(hashes(1, 2, 3)) == {owner: 3})
            assert (directory.mirror.num_gaps, directory.num_snapshots) == (1, num_snapshots + 1)


async def test_the_loss_of_a_nodes_last_message_is_noticed_too(server: RedisProcess) -> None:
    owner = NodeKey("decode-1", 1)
    async with reading(server.url, check_s=0.2) as directory:
        with publishing(server.url) as publisher:
            publisher.publish(stored(1, 2))
            await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {owner: 2})
            lossy = Lossy(directory, 2)
            publisher.publish(removed(2))
            await soon(lambda: lossy.has_lost)
            await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {owner: 1})
            assert directory.mirror.num_gaps == 0


async def test_whatever_happens_to_redis_under_load_the_mirror_ends_up_whole(server: RedisProcess) -> None:
    """Flushes, cut subscriptions and a restart while four nodes store and evict all the time."""
    rng = random.Random(3)
    names = [f"decode-{number}" for number in range(4)]
    held: dict[str, set[int]] = {name: set() for name in names}
    with contextlib.ExitStack() as stack:
        nodes = {name: stack.enter_context(publishing(server.url, of=record(name, 9))) for name in names}
        async with reading(server.url) as directory:
            for turn in range(300):
                name = rng.choice(names)
                chosen = set(rng.sample(range(2_000), 50))
                evicted = chosen & held[name]
                nodes[name].publish(removed(*evicted) + stored(*chosen - evicted))
                held[name] ^= chosen
                if turn in (60, 120):
                    server.client().flushall()
                elif turn in (90, 150):
                    server.client().execute_command("CLIENT", "KILL", "TYPE", "pubsub")
                elif turn == 200:
                    server.restart_empty()
                await asyncio.sleep(0.005)
            for number in range(2_000):  # every block alone: what holds it, and nobody else
                wanted = {(name, 9): 1 for name in names if number in held[name]}
                await soon(lambda n=number, w=wanted: directory.longest_prefix(hashes(n)) == w)
            directory.mirror.check_integrity()
            for name in names:
                key, wanted = KeySpace("t").blocks(NodeKey(name, 9), "gpu"), set(hashes(*held[name]))
                await soon(lambda k=key, w=wanted: server.client().smembers(k) == w)


async def test_the_reader_serves_what_it_knows_while_redis_is_away(server: RedisProcess) -> None:
    with publishing(server.url) as publisher:
        async with reading(server.url, grace_s=0.5) as directory:
            publisher.publish(stored(1))
            await soon(lambda: bool(directory.longest_prefix(hashes(1))))
            server.stop()
            await soon(lambda: not directory.connected)
            await asyncio.sleep(0.7)
            assert directory.longest_prefix(hashes(1)) == {("decode-1", 1): 1}
            assert len(directory.records()) == 1
            server.start()
            await soon(lambda: directory.connected)


async def test_a_paused_redis_never_blocks_publish_or_close(server: RedisProcess) -> None:
    """Whoever waited for it in `publish` would do so for ever."""
    publishers = [
        RedisPublisher(server.url, "t", record(f"decode-{number}"), times)
        for number, times in enumerate((replace(TIMES, io_timeout_s=10 * PATIENCE_S), TIMES))
    ]
    for publisher in publishers:
        publisher.publish(stored(1))
    await soon(lambda: server.client().dbsize() == 7)
    server.pause()
    for number in range(2, 2_000):
        for publisher in publishers:
            publisher.publish(stored(number))
        if number % 20 == 0:
            await asyncio.sleep(0.01)
    publishers[1].close()
    server.resume()
    publishers[0].close()


async def test_without_any_redis_a_publisher_lives_and_closes() -> None:
    with publishing("redis://127.0.0.1:1/0") as publisher:
        publisher.publish(stored(1))
        await asyncio.sleep(0.2)
        assert publisher.counters()["directory_connected"] == 0
        assert publisher.counters()["directory_blocks"] == 1


async def test_namespaces_are_separate_clusters(server: RedisProcess) -> None:
    async with reading(server.url, "one") as one, reading(server.url, "two") as two:
        with publishing(server.url, "one") as ours, publishing(server.url, "two", of=record("other", 2)) as theirs:
            ours.publish(stored(1))
            theirs.publish(stored(1))
            await soon(lambda: one.longest_prefix(hashes(1)) == {("decode-1", 1): 1})
            await soon(lambda: two.longest_prefix(hashes(1)) == {("other", 2): 1})


async def test_a_new_life_of_a_node_replaces_the_old_one(server: RedisProcess) -> None:
    async with reading(server.url) as directory:
        old = RedisPublisher(server.url, "t", record(epoch=1), TIMES)
        old.publish(stored(1, 2))
        await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {("decode-1", 1): 2})
        with publishing(server.url, of=record(epoch=2)) as new:
            new.publish(stored(1))
            await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {("decode-1", 2): 1})
            old.close()


async def test_rubbish_on_the_stream_is_ignored(server: RedisProcess) -> None:
    async with reading(server.url) as directory:
        with publishing(server.url) as publisher:
            await soon(lambda: len(directory.records()) == 1)
            client, keys = server.client(), KeySpace("t")
            client.publish(keys.events, b"\x00rubbish")
            client.set(keys.node("ghost"), b"\x00rubbish")
            client.sadd(keys.nodes, "ghost", "long gone")
            publisher.publish(stored(1))
            await soon(lambda: directory.longest_prefix(hashes(1)) == {("decode-1", 1): 1})
            await soon(lambda: not client.sismember(keys.nodes, "long gone"))
            assert len(directory.records()) == 1


async def test_names_that_are_no_text_are_passed_over_and_said_once(server: RedisProcess, caplog) -> None:
    client, keys = server.client(), KeySpace("t")
    client.sadd(keys.nodes, b"\xff\xfe", b"\xc3")
    async with reading(server.url) as directory:
        with publishing(server.url):
            await soon(lambda: [node.node_id for node in directory.records()] == ["decode-1"])
            await soon(lambda: directory.connected)
        await soon(lambda: not directory.records())
    assert caplog.text.count("which is no node") == 2


async def test_nodes_are_found_beside_a_key_of_another_type(server: RedisProcess, caplog) -> None:
    client, keys = server.client(), KeySpace("t")
    client.set(keys.nodes, "not a set")
    async with reading(server.url) as early:
        with publishing(server.url) as publisher:
            publisher.publish(stored(1))
            await soon(lambda: early.longest_prefix(hashes(1)) == {("decode-1", 1): 1})
            async with reading(server.url) as late:
                await soon(lambda: [node.node_id for node in late.records()] == ["decode-1"])
                client.delete(keys.nodes)
                await soon(lambda: client.type(keys.nodes) == b"set")
            await soon(lambda: early.connected)
    assert caplog.text.count("is not a set") == 2, "each reader says it once"


@pytest.mark.parametrize("kind", ["sequence", "sequence of another type", "blocks", "blocks of another type"])
async def test_odd_records_of_one_node_cost_that_node_its_prefixes(server: RedisProcess, kind: str) -> None:
    client, keys, odd, good = server.client(), KeySpace("t"), NodeKey("odd", 5), NodeKey("decode-1", 1)
    client.sadd(keys.nodes, "odd")
    client.set(keys.node("odd"), encode(record("odd", 5)))
    client.set(keys.sequence(odd), "nonsense" if kind == "sequence" else "1")
    if kind == "sequence of another type":
        client.delete(keys.sequence(odd))
        client.rpush(keys.sequence(odd), "1")
    elif kind == "blocks":
        client.sadd(keys.blocks(odd, "gpu"), b"too short")
    elif kind == "blocks of another type":
        client.set(keys.blocks(odd, "gpu"), "no set")
    with publishing(server.url) as publisher:
        publisher.publish(stored(1, 2))
        async with reading(server.url, check_s=0.1) as directory:
            await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {good: 2})
            assert {node.node_id for node in directory.records()} == {"odd", "decode-1"}
            publisher.publish(stored(3))
            await soon(lambda: directory.longest_prefix(hashes(1, 2, 3)) == {good: 3})
            await soon(lambda: directory.connected)


async def test_a_message_that_cannot_be_taken_in_costs_its_owner_a_snapshot(server: RedisProcess) -> None:
    owner, keys = NodeKey("decode-1", 1), KeySpace("t")
    async with reading(server.url) as directory:
        with publishing(server.url) as publisher:
            publisher.publish(stored(1))
            await soon(lambda: directory.longest_prefix(hashes(1)) == {owner: 1})
            change = TierChange("gpu", stored=b"no whole hash")
            next_one = directory.mirror.sequence(owner) + 1
            forged = Batch(node_id="decode-1", epoch=1, generation=1, sequence=next_one, reset=False, changes=(change,))
            num_snapshots = directory.num_snapshots
            server.client().publish(keys.events, encode(forged))
            await soon(lambda: directory.num_snapshots > num_snapshots)
            assert directory.longest_prefix(hashes(1)) == {owner: 1}
            publisher.publish(stored(2))
            await soon(lambda: directory.longest_prefix(hashes(1, 2)) == {owner: 2})
            directory.mirror.check_integrity()
