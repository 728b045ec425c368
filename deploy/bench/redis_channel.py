"""The directory's stream through a real Redis, one exchange at a time: for simulations, whose time is not real."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from tandem.kv_connector.directory.publisher import PublisherTimes, write_batch
from tandem.kv_connector.directory.records import Batch, DirectoryEvent, KeySpace, NodeRecord, decode_event

TIMEOUT_S = 10.0  # a guess: a local Redis answers in milliseconds


class RedisChannel:
    """Writes batches as a node's publisher does and returns what a router's subscription then hears."""

    def __init__(self, url: str, namespace: str = "tandem-simulation") -> None:
        self._keys = KeySpace(namespace)
        self._client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S)
        self._stream = self._client.pubsub(ignore_subscribe_messages=True)
        self._stream.subscribe(self._keys.events)
        self._stream.get_message(timeout=TIMEOUT_S)

    def __call__(self, batches: Sequence[Batch]) -> list[DirectoryEvent]:
        lease_s = PublisherTimes().lease_s
        with self._client.pipeline(transaction=True) as pipe:
            for batch in batches:
                record = NodeRecord(node_id=batch.node_id, epoch=batch.epoch, role="unified", control_address="")
                write_batch(pipe, self._keys, record, batch, lease_s)
            pipe.execute()
        heard: list[DirectoryEvent] = []
        while len(heard) < len(batches):
            message = self._stream.get_message(timeout=TIMEOUT_S)
            assert message is not None, "Redis published nothing"
            event = decode_event(message["data"])
            if isinstance(event, Batch):  # the others announce nodes
                heard.append(event)
        return heard

    def close(self) -> None:
        self._stream.close()
        self._client.close()
