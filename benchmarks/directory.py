"""What the block directory costs: memory in Redis and in a router, publishing, snapshots, lookups.

    python benchmarks/directory.py [--nodes 64] [--entries 1000000] [--redis-url URL]

Real publishers (a thread each, all in this process) write `--entries` block hashes into a real redis-server and onto
its stream, which a real router's reader follows. Then a second reader starts from snapshots. Lookups are of 128 blocks
(8k tokens), of which a random part is held by one to eight nodes, in mirrors of three sizes. Times are of the wall but
for lookups, which are CPU time. Without `--redis-url` an own server is started; its memory is what `INFO` calls used.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import random
import time
import tracemalloc
from collections.abc import Callable

import redis

from tandem.deploy.redis_server import RedisServer
from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.mirror import Mirror
from tandem.kv_connector.directory.publisher import RedisPublisher
from tandem.kv_connector.directory.reader import RedisDirectory
from tandem.kv_connector.directory.records import Batch, KeySpace, NodeRecord, TierChange, join_hashes

NAMESPACE = f"benchmark-{os.getpid()}"
CHUNK = 512  # events that a node's step loop hands over at once
PROMPT_BLOCKS = 128
NUM_HELD = 200  # prompts that somebody holds a part of


async def until(condition: Callable[[], bool], every_s: float = 0.005) -> float:
    """Waits until the condition holds; returns the seconds that it took."""
    started = time.perf_counter()
    while not condition():
        await asyncio.sleep(every_s)
    return time.perf_counter() - started


def used_memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])  # type: ignore[index]


async def measure_redis(url: str, num_nodes: int, num_entries: int) -> None:
    client = redis.Redis.from_url(url)
    before = used_memory(client)
    records = [
        NodeRecord(node_id=f"node-{number:03}", epoch=number + 1, role="decode", control_address="tcp://127.0.0.1:1")
        for number in range(num_nodes)
    ]
    publishers = [RedisPublisher(url, NAMESPACE, record) for record in records]
    follower = RedisDirectory(url, NAMESPACE, max_entries=2 * num_entries)
    follower.start()
    try:
        await until(lambda: len(follower.records()) == num_nodes)
        own = [[os.urandom(16) for _ in range(num_entries // num_nodes)] for _ in publishers]
        total = sum(map(len, own))
        await publish(publishers, own, follower, total)
        keys = [KeySpace(NAMESPACE).blocks(record.owner, "gpu") for record in records]
        await until(lambda: sum(client.scard(key) for key in keys) == total)  # type: ignore[misc]
        used = used_memory(client) - before
        print(f"Redis: {used / total:.1f} bytes an entry, {used / 2**20:.0f} MiB with {num_nodes} nodes' records")
        await latency(publishers[0], follower, records[0])
        for traced in (False, True):
            await snapshots(url, total, traced)
    finally:
        for publisher in publishers:
            publisher.close()
        await follower.close()
        client.close()


async def publish(
    publishers: list[RedisPublisher], own: list[list[bytes]], follower: RedisDirectory, total: int
) -> None:
    started, slowest_s = time.perf_counter(), 0.0
    for start in range(0, len(own[0]), CHUNK):
        for publisher, hashes in zip(publishers, own, strict=True):
            events = [BlockEvent(block_hash, True) for block_hash in hashes[start : start + CHUNK]]
            called = time.perf_counter()
            publisher.publish(events)
            slowest_s = max(slowest_s, time.perf_counter() - called)
        await asyncio.sleep(0)
    await until(lambda: follower.mirror.num_entries >= total)
    took_s = time.perf_counter() - started
    print(
        f"publish: {total / took_s:,.0f} entries/s from {len(publishers)} nodes through Redis into a router's mirror, "
        f"all in one process and one core's Python; slowest publish() {slowest_s * 1e3:.1f} ms; "
        f"{follower.mirror.num_gaps} gaps"
    )


async def latency(publisher: RedisPublisher, follower: RedisDirectory, record: NodeRecord) -> None:
    seconds = []
    for _ in range(100):
        block_hash = os.urandom(16)
        publisher.publish([BlockEvent(block_hash, True)])
        seconds.append(await until(lambda h=block_hash: bool(follower.longest_prefix([h])), 0.0005))  # type: ignore[misc]
    seconds.sort()
    print(f"stored on {record.node_id} to found by a router: {seconds[50] * 1e3:.1f} ms median, "
          f"{seconds[99] * 1e3:.1f} ms at most")  # fmt: skip


async def snapshots(url: str, total: int, traced: bool) -> None:
    gc.collect()
    if traced:
        tracemalloc.start()
    reader = RedisDirectory(url, NAMESPACE, max_entries=2 * total)
    reader.start()
    took_s = await until(lambda: reader.mirror.num_entries >= total)
    if traced:
        gc.collect()
        print(f"mirror: {tracemalloc.get_traced_memory()[0] / total:.1f} bytes an entry")
        tracemalloc.stop()
    else:
        print(f"snapshot: {took_s:.1f} s for {total:,} entries of {reader.num_snapshots} nodes")
    await reader.close()


def measure_lookups(num_nodes: int, num_entries: int) -> None:
    for size in (num_entries // 10, num_entries, 4 * num_entries):
        rng = random.Random(size)
        mirror, sequences = Mirror(2 * size), [0] * num_nodes
        for number in range(num_nodes):
            mirror.adopt(NodeKey(f"node-{number:03}", 1))

        def store(number: int, hashes: bytes, mirror: Mirror = mirror, sequences: list[int] = sequences) -> None:
            sequences[number] += 1
            change, first = TierChange("gpu", hashes), sequences[number] == 1
            mirror.apply(Batch(node_id=f"node-{number:03}", epoch=1, generation=1, sequence=sequences[number],
                               reset=first, changes=(change,)))  # fmt: skip

        prompts = [[rng.randbytes(16) for _ in range(PROMPT_BLOCKS)] for _ in range(2 * NUM_HELD)]
        for prompt in prompts[:NUM_HELD]:
            for number in rng.sample(range(num_nodes), min(num_nodes, rng.choice((1, 1, 2, 8)))):
                store(number, join_hashes(prompt[: rng.randint(1, PROMPT_BLOCKS)]))
        while mirror.num_entries < size:
            store(rng.randrange(num_nodes), rng.randbytes(16 * min(4_096, size - mirror.num_entries)))
        held, cold = timed(mirror, prompts[:NUM_HELD]), timed(mirror, prompts[NUM_HELD:])
        print(f"lookup of {PROMPT_BLOCKS} blocks among {mirror.num_entries:>9,} entries of {num_nodes} nodes: "
              f"{held[0]:.1f} us median, {held[1]:.1f} us p99 (cold prompts {cold[0]:.1f} us)")  # fmt: skip


def timed(mirror: Mirror, prompts: list[list[bytes]]) -> tuple[float, float]:
    """Median and 99th percentile in microseconds of CPU time."""
    samples = []
    for _ in range(max(1, 2_000 // len(prompts))):
        for prompt in prompts:
            started = time.thread_time_ns()
            mirror.longest_prefix(prompt)
            samples.append((time.thread_time_ns() - started) / 1e3)
    samples.sort()
    return samples[len(samples) // 2], samples[len(samples) * 99 // 100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--redis-url", default="", help="a server of one's own; default: one is started")
    arguments = parser.parse_args()
    measure_lookups(arguments.nodes, arguments.entries)
    server = None if arguments.redis_url else RedisServer()
    if server is not None:
        server.start()
    try:
        url = arguments.redis_url or server.url  # type: ignore[union-attr]
        asyncio.run(measure_redis(url, arguments.nodes, arguments.entries))
    finally:
        if server is not None:
            server.stop()


if __name__ == "__main__":
    main()
