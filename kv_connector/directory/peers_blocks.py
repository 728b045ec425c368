"""Asks Redis which blocks peers of this host hold, for the directory's thread of a node."""

from __future__ import annotations

import logging

import msgspec
import redis

from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.directory.kept import MOST_PEERS, KeptElsewhere, gives_way
from tandem.kv_connector.directory.records import KeySpace, NodeRecord, decode_record
from tandem.kv_connector.directory.servers import RedisServers

log = logging.getLogger(__name__)
once = RateLimited(log, repeat_s=3600.0)


class PeersBlocks:
    """Answers what `kept` asks."""

    def __init__(self, kept: KeptElsewhere, record: NodeRecord, keys: KeySpace) -> None:
        self._kept, self._record, self._keys = kept, record, keys

    def look(self, servers: RedisServers) -> None:
        """Asks now. Raises Redis' errors, but for a server or a user that can't do this: then nothing is left to
        anybody."""
        asked, read_at = self._kept.asked, self._kept.clock()
        held: set[bytes] = set()
        try:
            for peer in self._peers(servers) if asked else ():
                with servers.client_for(self._keys.node(peer.node_id)).pipeline(transaction=False) as pipe:
                    for key in self._keys.all_blocks(peer.owner):
                        pipe.smismember(key, list(asked))
                    for flags in pipe.execute():
                        held.update(each for each, flag in zip(asked, flags, strict=True) if flag)
        except redis.ResponseError as error:
            once.warning("directory: can't ask what peers keep (%s): Redis 6.2 and +smismember are needed", error)
            return
        self._kept.answer(held, read_at)

    def _peers(self, servers: RedisServers) -> list[NodeRecord]:
        """Nodes of this host and model to which this one gives way, and whose lease holds."""
        members = servers.client_for(self._keys.nodes).smembers(self._keys.nodes)
        names = [str(name, "utf-8", "replace") for name in members if isinstance(name, bytes)]
        behind = sorted(name for name in names if gives_way(self._record.node_id, name))[:MOST_PEERS]
        found = [servers.client_for(self._keys.node(name)).get(self._keys.node(name)) for name in behind]
        return [record for packed in found if isinstance(packed, bytes) and (record := self._alike(packed)) is not None]

    def _alike(self, packed: bytes) -> NodeRecord | None:
        try:
            record = decode_record(packed)
        except msgspec.DecodeError:
            return None
        own = self._record
        is_near = _host(record) == _host(own)
        return record if is_near and record.identity_key == own.identity_key else None


def _host(record: NodeRecord) -> str:
    return record.control_address.rsplit(":", 1)[0]
