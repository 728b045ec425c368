"""The node's side of the directory: a lease and a stream of batches, written to Redis by a thread of their own.

`publish` touches memory only. Redis may be down, paused, emptied or replaced at any time: the thread reconnects and
writes everything again from the node's own view, so Redis is whole again within `heartbeat_s` plus a second or two.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import redis
from redis.client import Pipeline

from tandem.engine.contracts.directory import BlockEvent
from tandem.engine.process.process_log import RateLimited
from tandem.engine.process.watched import watched_thread
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.directory.own_view import OwnView
from tandem.kv_connector.directory.peers_blocks import PeersBlocks
from tandem.kv_connector.directory.records import (
    Batch,
    KeySpace,
    NodeLeft,
    NodeRecord,
    NodeUp,
    encode,
    split_hashes,
)
from tandem.kv_connector.directory.servers import RedisServers, is_wrong_type

log = logging.getLogger(__name__)
once = RateLimited(log, repeat_s=3600.0)  # a wrong record in Redis stays until somebody removes it

# Pending events are gathered this long into one batch. A guess; it makes up most of the delay in
# docs/measurements.md#directory-of-blocks.
FLUSH_S = 0.01
MAX_BACKOFF_S = 1.0  # a guess
TRANSACTION_BATCHES = 16  # batches in one round trip: at most 1 MiB; a guess
REDIS_ERRORS = (redis.RedisError, OSError)


@dataclass(frozen=True)
class PublisherTimes:
    """How often a node writes to Redis, and how long what it wrote lasts."""

    heartbeat_s: float = 1.0  # between lease renewals, each with a check that Redis has kept what it was told
    lease_s: float = 15.0  # TTL of everything this node writes; a guess
    io_timeout_s: float = 1.0  # a Redis that answers slower counts as down


class RedisPublisher:
    """Publishes a node's record and blocks. It starts its thread at once, and never raises into the node, whether Redis
    is there or not.

    """

    def __init__(
        self,
        url: str,
        namespace: str,
        record: NodeRecord,
        times: PublisherTimes | None = None,
        kept: KeptElsewhere | None = None,
    ) -> None:
        """`kept`: is told what peers keep of the blocks that it asks for; None: nobody asks."""
        self._times = times or PublisherTimes()
        self._keys = KeySpace(namespace)
        self._record = record
        self._peers_blocks = None if kept is None else PeersBlocks(kept, record, self._keys)
        self._view = OwnView(record.owner)
        self._lock = threading.Lock()  # guards _view; held for in-memory work only
        self._wake = threading.Event()
        self._closing = False
        self._connected = False
        self._servers = RedisServers(url, self._times.io_timeout_s)
        self._away = RateLimited(log)
        self._thread = watched_thread(self._run, "tandem-directory")
        self._thread.start()

    def publish(self, events: Sequence[BlockEvent]) -> None:
        with self._lock:
            self._view.record(events)
        self._wake.set()

    def close(self) -> None:
        """Takes this node's records out of Redis, if Redis is there; returns within two I/O timeouts."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=2 * self._times.io_timeout_s)

    def counters(self) -> dict[str, float]:
        return {
            "directory_connected": float(self._connected),
            "directory_blocks": float(self._view.num_held()),
            "directory_generations": float(self._view.generation),
            "directory_overflows": float(self._view.num_overflows),
        }

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        backoff_s = 0.1
        while not self._closing:
            try:
                self._serve()
            except Exception as error:  # of whatever kind: a node without a directory still serves
                if not isinstance(error, REDIS_ERRORS):
                    log.exception("directory: an unexpected error; starting over")
                else:
                    self._away.warning(
                        "directory: no Redis (%s); this node goes on and publishes again later, but who "
                        "doesn't know it yet finds it through Redis alone",
                        error,
                        key=str(error),
                    )
                self._connected = False
                with contextlib.suppress(*REDIS_ERRORS):
                    self._servers.disconnect()
                with self._lock:
                    self._view.publish_all_again()
                self._pause(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                backoff_s = 0.1
        with contextlib.suppress(*REDIS_ERRORS):
            self._leave()
        self._servers.close()

    def _serve(self) -> None:
        """Publishes until closing; returns after each heartbeat, raises when Redis fails."""
        if not self._connected:
            self._greet()
            self._connected = True
        self._heartbeat()
        if self._peers_blocks is not None:
            self._peers_blocks.look(self._servers)
        next_heartbeat = time.monotonic() + self._times.heartbeat_s
        while not self._closing and (left_s := next_heartbeat - time.monotonic()) > 0:
            self._flush()
            if self._wake.wait(left_s):
                self._pause(FLUSH_S)
                self._wake.clear()
        self._flush()
        self._away.over()

    def _pause(self, duration_s: float) -> None:
        """Sleeps, but not through a close."""
        deadline = time.monotonic() + duration_s
        while not self._closing and (left_s := deadline - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))

    def _client(self) -> redis.Redis:
        """A client of the server that has this node's keys, which are all in one slot."""
        return self._servers.client_for(self._keys.node(self._record.node_id))

    def _greet(self) -> None:
        # A managed Redis may forbid CONFIG; expiry of a dead node's sets then blocks it for a moment, no more.
        with contextlib.suppress(redis.ResponseError):
            self._client().config_set("lazyfree-lazy-expire", "yes")

    def _heartbeat(self) -> None:
        """Renews the lease, and finds out whether Redis lost, or never got, anything that was published."""
        record = self._record
        ttl_ms = int(self._times.lease_s * 1000)
        keys = self._keys
        with self._client().pipeline(transaction=True) as pipe:
            pipe.set(keys.node(record.node_id), encode(record), px=ttl_ms)
            for key in (*keys.all_blocks(record.owner), keys.sequence(record.owner)):
                pipe.pexpire(key, ttl_ms)
            pipe.get(keys.sequence(record.owner))
            stored_sequence = pipe.execute()[-1]
        self._register()
        if int(stored_sequence or 0) != self._view.sequence:
            self._start_over()

    def _register(self) -> None:
        keys = self._keys
        try:
            self._servers.client_for(keys.nodes).sadd(keys.nodes, self._record.node_id)
        except redis.ResponseError as error:
            if not is_wrong_type(error):
                raise
            once.error("directory: %s is not a set: this node is found by what it announces alone", keys.nodes)
            self._client().publish(keys.events, encode(NodeUp(record=self._record)))

    def _flush(self) -> None:
        with self._lock:
            if not self._view.has_pending():
                return
            changes = self._view.take()
        batches = self._view.number(changes)
        for start in range(0, len(batches), TRANSACTION_BATCHES):
            part = batches[start : start + TRANSACTION_BATCHES]
            with self._client().pipeline(transaction=True) as pipe:
                for batch in part:
                    write_batch(pipe, self._keys, self._record, batch, self._times.lease_s)
                pipe.get(self._keys.sequence(self._record.owner))
                stored_sequence = int(pipe.execute()[-1] or 0)
            if stored_sequence != part[-1].sequence:
                self._start_over()
                return

    def _start_over(self) -> None:
        log.warning("directory: Redis lost this node's blocks; publishing them again")
        with self._lock:
            self._view.publish_all_again()

    def _leave(self) -> None:
        """Takes the node's records out of Redis. A successor under the same id loses its lease by this, until its next
        heartbeat."""
        keys, owner = self._keys, self._record.owner
        with self._client().pipeline(transaction=True) as pipe:
            pipe.unlink(*keys.all_blocks(owner), keys.sequence(owner), keys.node(owner.node_id))
            pipe.publish(keys.events, encode(NodeLeft(node_id=owner.node_id, epoch=owner.epoch)))
            pipe.execute()
        self._servers.client_for(keys.nodes).srem(keys.nodes, owner.node_id)


def write_batch(pipe: Pipeline, keys: KeySpace, record: NodeRecord, batch: Batch, lease_s: float) -> None:
    """Queues what `batch` changes in Redis, and its announcement. The sequence is counted up, not set, so that it comes
    out wrong in a Redis that was emptied, which shows the loss."""
    ttl_ms, sequence_key = int(lease_s * 1000), keys.sequence(batch.owner)
    if batch.reset:
        pipe.unlink(*keys.all_blocks(batch.owner))
        pipe.set(sequence_key, batch.sequence - 1)
        pipe.publish(keys.events, encode(NodeUp(record=record)))
    for change in batch.changes:
        key = keys.blocks(batch.owner, change.tier)
        if change.removed:
            pipe.srem(key, *split_hashes(change.removed))
        if change.stored:
            pipe.sadd(key, *split_hashes(change.stored))
            pipe.pexpire(key, ttl_ms)
    pipe.incr(sequence_key)
    pipe.pexpire(sequence_key, ttl_ms)
    pipe.publish(keys.events, encode(batch))
