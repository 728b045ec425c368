"""The router's side of the directory: discovery of nodes and the mirror of their blocks, fed from Redis by one task.

The task subscribes first and reads snapshots after, on another connection, while the stream waits in the socket;
batches that a snapshot already contains are recognised by their sequence. Nothing here raises into the router:
without Redis the mirror serves what it last knew. Whatever somebody wrote into Redis that is no record of ours costs
that record alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence

from redis import RedisError, ResponseError
from redis.asyncio.client import PubSub

from tandem.engine.contracts.errors import DecodeError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.process.process_log import RateLimited
from tandem.engine.process.watched import lasting_task
from tandem.kv_connector.directory.discovery import Discovery, NodeChange
from tandem.kv_connector.directory.mirror import Mirror, Outcome
from tandem.kv_connector.directory.records import (
    TIERS,
    Batch,
    DirectoryEvent,
    KeySpace,
    NodeLeft,
    NodeRecord,
    NodeUp,
    decode_event,
    decode_record,
)
from tandem.kv_connector.directory.servers import AsyncRedisServers, is_wrong_type

log = logging.getLogger(__name__)
once = RateLimited(log, repeat_s=3600.0)  # a wrong record in Redis stays until somebody removes it

SWEEP_S = 1.0  # between readings of all leases, beside the stream's announcements; a guess
CHECK_S = 5.0  # between comparisons of Redis's sequences with those that were heard; a guess
SCAN_COUNT = 1_000  # hashes per SSCAN answer: below a millisecond of the event loop; a guess
TURN_S = 0.0005  # for taking messages before requests get their turn; a guess
LEAST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0  # guesses
REDIS_ERRORS = (RedisError, OSError, asyncio.TimeoutError)


class RedisDirectory:
    """Implements DirectoryReader over Redis. Call `start()` inside a running event loop and `close()` at the end; only
    one `watch()` may run."""

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        grace_s: float = 15.0,
        max_entries: int = 4_000_000,
        io_timeout_s: float = 2.0,
        check_s: float = CHECK_S,
    ) -> None:
        self.mirror = Mirror(max_entries)
        self.num_snapshots = 0
        self.connected = False
        self._check_s, self._next_check = check_s, 0.0
        self._should_have: dict[NodeKey, int] = {}  # sequences that Redis had at the last check
        self._keys = KeySpace(namespace)
        self._discovery = Discovery(grace_s)
        self._changes: asyncio.Queue[NodeChange] = asyncio.Queue()
        self._servers = AsyncRedisServers(url, io_timeout_s)
        self._away = RateLimited(log)
        self._backoff_s = LEAST_BACKOFF_S
        self._task: asyncio.Task[None] | None = None
        self._closing = False

    def start(self) -> None:
        assert self._task is None, "started already"
        self._task = lasting_task(self._run, "tandem-directory")

    async def close(self) -> None:
        self._closing = True
        # The Redis client may turn a cancellation that meets it while connecting into a ConnectionError.
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.1)
        await self._servers.aclose()

    async def watch(self) -> AsyncIterator[NodeChange]:
        """Yields each node found, and each whose lease has long been missing. Never ends and never raises."""
        while True:
            yield await self._changes.get()

    def longest_prefix(self, block_hashes: Sequence[bytes]) -> dict[NodeKey, int]:
        return self.mirror.longest_prefix(block_hashes)

    def records(self) -> list[NodeRecord]:
        """The newest known record of each node."""
        return list(self._discovery.records.values())

    def counters(self) -> dict[str, float]:
        return {
            "directory_connected": float(self.connected),
            "directory_entries": float(self.mirror.num_entries),
            "directory_gaps": float(self.mirror.num_gaps),
            "directory_snapshots": float(self.num_snapshots),
            "directory_forgotten_owners": float(self.mirror.num_forgotten_owners),
        }

    # --- the task -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while not self._closing:
            try:
                async with await self._servers.stream() as stream:
                    await stream.subscribe(self._keys.events)
                    self.mirror.distrust()
                    await self._follow(stream)
            except Exception as error:  # of whatever kind: a router without a directory still serves
                if not isinstance(error, REDIS_ERRORS):
                    log.exception("directory: an unexpected error; starting over")
                else:
                    self._away.warning(
                        "directory: no Redis (%s); placement goes on with what is known, but nodes are found through "
                        "Redis alone",
                        error,
                        key=str(error),
                    )
                self.connected = False
                with contextlib.suppress(*REDIS_ERRORS):
                    await self._servers.reconnect()
                self._discovery.unreachable(time.monotonic())
                await asyncio.sleep(self._backoff_s)
                self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    async def _follow(self, stream: PubSub) -> None:
        next_sweep = end_of_turn = 0.0
        while True:
            if (now := time.monotonic()) >= end_of_turn:  # messages that are here never make this task wait
                await asyncio.sleep(0)
                now = time.monotonic()
                end_of_turn = now + TURN_S
            if now >= next_sweep:
                await self._sweep()
                await self._check_sequences(now)
                self._all_is_well()
                next_sweep = now + min(SWEEP_S, self._check_s)
            for owner in self.mirror.needs_snapshot():
                await self._snapshot(owner)
            message = await stream.get_message(ignore_subscribe_messages=True, timeout=max(0.0, next_sweep - now))
            if message is not None and isinstance(message["data"], bytes):
                await self._take(message["data"])

    def _all_is_well(self) -> None:
        """Notes that everything was read. A subscription alone does not prove that: a cluster of which one server is
        gone takes subscriptions, but can't be read."""
        self.connected, self._backoff_s = True, LEAST_BACKOFF_S
        self._away.over()

    async def _take(self, data: bytes) -> None:
        event: DirectoryEvent | None = None
        try:
            event = decode_event(data)
            await self._note(event)
        except DecodeError as error:
            once.warning("directory: a message on %s can't be read: %s", self._keys.events, error)
        except REDIS_ERRORS:
            raise
        except Exception:  # costs this message; its owner, if known, is read anew
            once.exception("directory: a message on %s can't be taken in", self._keys.events)
            if isinstance(event, Batch) and event.owner in self.mirror.owners():
                self.mirror.distrust(event.owner)

    async def _note(self, event: DirectoryEvent) -> None:
        if isinstance(event, NodeUp):
            self._found(self._discovery.up(event.record, time.monotonic()))
        elif isinstance(event, NodeLeft):
            self._found(self._discovery.left(NodeKey(event.node_id, event.epoch)))
        elif self.mirror.apply(event) is Outcome.GAP:
            await self._meet(event)

    async def _meet(self, batch: Batch) -> None:
        """Handles a batch that can't be applied. A node not met yet is adopted if its lease says that it exists; a
        known owner gets a snapshot."""
        if batch.owner in self.mirror.owners():
            return
        (packed,) = await self._servers.get_many([self._keys.node(batch.node_id)])
        record = self._decode(batch.node_id, packed) if packed else None
        if record is not None and record.epoch == batch.epoch:
            self._found(self._discovery.up(record, time.monotonic()))

    async def _sweep(self) -> None:
        names = await self._names()
        leases = await self._servers.get_many([self._keys.node(name) for name in names])
        expired = [name for name, lease in zip(names, leases, strict=True) if lease is None]
        if expired:
            # A node that returns adds itself again with its next heartbeat.
            await self._servers.client.srem(self._keys.nodes, *expired)
        found = [self._decode(name, lease) for name, lease in zip(names, leases, strict=True) if lease]
        present = [record for record in found if record is not None]
        self._found(self._discovery.observe(present, time.monotonic()))

    async def _names(self) -> list[str]:
        try:
            members = await self._servers.client.smembers(self._keys.nodes)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            once.error("directory: %s is not a set: nodes are found by what they announce alone", self._keys.nodes)
            return sorted(self._discovery.records)
        names = []
        for member in members:
            try:
                names.append(_raw(member).decode())
            except UnicodeDecodeError:
                once.warning("directory: %s names %r, which is no node", self._keys.nodes, member[:100], key=member)
        return sorted(names)

    async def _check_sequences(self, now: float) -> None:
        """Compares sequences with those in Redis. A gap shows with the next batch, the loss of the last batch only
        here: a cluster's bus may lose messages."""
        if now < self._next_check:
            return
        self._next_check = now + self._check_s
        owners = self.mirror.owners()
        stored = await self._servers.get_many([self._keys.sequence(owner) for owner in owners])
        before, self._should_have = self._should_have, {}
        for owner, sequence in zip(owners, stored, strict=True):
            try:
                self._should_have[owner] = int(sequence or 0)
            except ValueError:
                once.warning(
                    "directory: the sequence of %s is no number", owner.node_id, key=("sequence", owner.node_id)
                )
                continue
            if before.get(owner, 0) > self.mirror.sequence(owner):
                log.warning("directory: a message of %s was lost; taking a snapshot", owner.node_id)
                self.mirror.distrust(owner)

    async def _snapshot(self, owner: NodeKey) -> None:
        try:
            await self._load(owner)
        except (ResponseError, ValueError) as error:
            if isinstance(error, ResponseError) and not is_wrong_type(error):
                raise
            once.warning(
                "directory: the blocks of %s can't be read: %s", owner.node_id, error, key=("blocks", owner.node_id)
            )
            self.mirror.await_reset(owner)

    async def _load(self, owner: NodeKey) -> None:
        stored_sequence = await self._servers.client.get(self._keys.sequence(owner))
        if stored_sequence is None:
            # Redis lost it, or it is not published yet: a reset is on its way, the old entries serve on.
            self.mirror.await_reset(owner)
            return
        hashes_by_tier = {tier: await self._scan(self._keys.blocks(owner, tier)) for tier in TIERS}
        self.mirror.load(owner, int(stored_sequence), hashes_by_tier)
        self.num_snapshots += 1

    async def _scan(self, key: str) -> list[bytes]:
        return [block_hash async for block_hash in self._servers.client.sscan_iter(key, count=SCAN_COUNT)]

    def _found(self, changes: list[NodeChange]) -> None:
        for change in changes:
            if change.present:
                self.mirror.adopt(change.record.owner)
            else:
                self.mirror.drop(change.record.node_id)
            if not change.is_address_taken:
                self._changes.put_nowait(change)

    def _decode(self, name: str, packed: bytes | str) -> NodeRecord | None:
        try:
            return decode_record(_raw(packed))
        except DecodeError as error:
            once.warning("directory: the record of %r can't be read: %s", name[:100], error, key=("record", name))
            return None


def _raw(value: bytes | str) -> bytes:
    """The client's types allow str; it answers bytes unless a URL asks it to decode."""
    return value if isinstance(value, bytes) else value.encode()
