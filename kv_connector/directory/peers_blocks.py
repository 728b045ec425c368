"""Asks Redis which blocks peers of this host hold, for the directory's thread of a node."""

from __future__ import annotations

import logging
from itertools import chain

import msgspec
import redis

from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.directory.kept import MOST_PEERS, KeptElsewhere, gives_way
from tandem.kv_connector.directory.records import TIERS, WHOLE, KeySpace, NodeRecord, decode_record
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
        questions, read_at = (self._kept.soon, self._kept.colder), self._kept.clock()
        asked = list(dict.fromkeys(self._kept.asked))
        seen = list(dict.fromkeys(chain.from_iterable(each.parent_of for each in questions)))
        held, ends = set[bytes](), set[bytes]()
        try:
            for peer in self._peers(servers) if asked else ():
                known, whole = self._held(servers, peer, asked, seen)
                held |= known
                ends.update(*(each.ends(known, whole) for each in questions))
        except redis.ResponseError as error:
            once.warning("directory: can't ask what peers keep (%s): Redis 6.2 and +smismember are needed", error)
            return
        self._kept.answer(held, read_at, ends)

    def _held(
        self, servers: RedisServers, peer: NodeRecord, asked: list[bytes], seen: list[bytes]
    ) -> tuple[set[bytes], set[bytes]]:
        """Which of `asked` the peer has on some tier, and which of `seen` with their window blocks."""
        questions = [(tier, asked) for tier in TIERS] + ([(WHOLE, seen)] if seen else [])
        found: list[set[bytes]] = []
        with servers.client_for(self._keys.node(peer.node_id)).pipeline(transaction=False) as pipe:
            for tier, hashes in questions:
                pipe.smismember(self._keys.blocks(peer.owner, tier), hashes)
            for (_, hashes), flags in zip(questions, pipe.execute(), strict=True):
                found.append({each for each, flag in zip(hashes, flags, strict=True) if flag})
        return set[bytes]().union(*found[: len(TIERS)]), set[bytes]().union(*found[len(TIERS) :])

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
