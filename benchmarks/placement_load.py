"""Placing requests as they come, while the directory changes: how long each placement takes, and waits for its turn.

    python benchmarks/placement_load.py [--rate 1000] [--changes-per-s 20000] [--seconds 10]

A real redis-server, publishers of `--nodes` nodes in a process of their own, and in this one what a router process has
on its event loop: the reader that follows the stream, and `--rate` requests a second, each hashed, looked up and placed
when it is due. A million entries by default; prompts as in `placement.py`. Times are of the wall: "placed" from when
the loop came to the request, of those that somebody holds, of those that nobody holds, and of all; "done" of all, from
when it was due, behind whatever the loop did before it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator

from placement import Bed, place

from tandem.deploy.redis_server import RedisServer
from tandem.engine.contracts.directory import BlockEvent
from tandem.kv_connector.directory.publisher import RedisPublisher
from tandem.kv_connector.directory.reader import RedisDirectory
from tandem.kv_connector.directory.records import NodeRecord
from tandem.router.placing.policies import make_policy

NAMESPACE = "benchmark"
SPAWN = multiprocessing.get_context("spawn")
TURN_S = 0.01  # a node's step
CHUNK = 2_048  # hashes that a publisher is given at once


def publishers_main(url: str, arguments: argparse.Namespace) -> None:
    """Publishes what the nodes hold, then keeps changing random blocks until it is terminated."""
    bed = Bed(arguments)
    publishers = {
        owner: RedisPublisher(
            url, NAMESPACE, NodeRecord(node_id=owner[0], epoch=owner[1], role="decode", control_address="tcp://x:1")
        )
        for owner in bed.owners
    }
    count = 0
    for owner, hashes in bed.held():
        publishers[owner].publish([BlockEvent(hashes[i : i + 16], True) for i in range(0, len(hashes), 16)])
        count += len(hashes) // 16
    turns: Iterator[RedisPublisher] = iter(())
    while count < arguments.entries:
        turns = turns if (publisher := next(turns, None)) else iter(publishers.values())
        if publisher is not None:
            publisher.publish([BlockEvent(os.urandom(16), True) for _ in range(CHUNK)])
            count += CHUNK
    each = max(1, round(arguments.changes_per_s * TURN_S / 2 / len(publishers)))
    changing: dict[RedisPublisher, list[bytes]] = {publisher: [] for publisher in publishers.values()}
    while True:
        began = time.monotonic()
        for publisher, old in changing.items():
            new = [os.urandom(16) for _ in range(each)]
            publisher.publish([BlockEvent(block, False) for block in old] + [BlockEvent(block, True) for block in new])
            changing[publisher] = new
        time.sleep(max(0.0, began + TURN_S - time.monotonic()))


async def follow_and_place(url: str, arguments: argparse.Namespace) -> None:
    bed, policy = Bed(arguments), make_policy("prefix_aware", seed=1)
    reader = RedisDirectory(url, NAMESPACE, max_entries=4 * arguments.entries)
    reader.start()
    bed.mirror = reader.mirror
    while reader.mirror.num_entries < 0.99 * arguments.entries:
        await asyncio.sleep(0.1)
    gc.collect()
    gc.freeze()
    held: list[float] = []
    cold: list[float] = []
    done: list[float] = []
    begin = time.perf_counter()
    for number in range(round(arguments.rate * arguments.seconds)):
        due = begin + number / arguments.rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        started = time.perf_counter()
        index = number % len(bed.prompts)
        place(bed, policy, bed.prompts[index])
        ended = time.perf_counter()
        (cold if index % 2 else held).append(ended - started)
        done.append(ended - due)
    print(f"{arguments.rate:g} requests/s of {arguments.tokens} tokens, {reader.mirror.num_entries} entries of "
          f"{arguments.nodes} nodes, {reader.mirror.num_gaps} gaps")  # fmt: skip
    for name, measured in (("placed, held", held), ("placed, cold", cold), ("placed", held + cold), ("done", done)):
        seconds = sorted(measured)
        p50, p99 = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
        print(f"{name:14}{p50 * 1e6:9.1f} us median{p99 * 1e6:9.1f} us p99{seconds[-1] * 1e6:9.1f} us at most")
    await reader.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("nodes", 64), ("entries", 1_000_000), ("tokens", 8192), ("requests", 2000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, rate in (("rate", 1000.0), ("changes-per-s", 20_000.0), ("seconds", 10.0)):
        parser.add_argument(f"--{name}", type=float, default=rate)
    arguments = parser.parse_args()
    server = RedisServer()
    server.start()
    publishers = SPAWN.Process(target=publishers_main, args=(server.url, arguments), daemon=True)
    publishers.start()
    try:
        asyncio.run(follow_and_place(server.url, arguments))
    finally:
        publishers.terminate()
        publishers.join()
        server.stop()


if __name__ == "__main__":
    main()
