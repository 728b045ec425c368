"""The directory's records in Redis and the messages of its stream. Pure data.

<ns>:nodes                    SET of node ids that ever took a lease (readers drop the stale ones)
<ns>:{<id>}:node              msgpack NodeRecord, with a TTL: the node's lease
<ns>:{<id>}:kv:<epoch>:<tier> SET of 16-byte block hashes, with the lease's TTL
<ns>:{<id>}:kv:<epoch>:whole  SET of those that have their window blocks, on whatever tier
<ns>:{<id>}:seq:<epoch>       sequence number of the newest Batch that the SETs contain, with the lease's TTL
<ns>:events                   pub/sub channel of DirectoryEvent

The braces are in the names: they keep a node's keys in one slot of a Redis Cluster, where they can be one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.parts import Role

HASH_BYTES = 16
TIERS = ("gpu", "cpu", "disk")
WHOLE = "whole"  # no tier: blocks that have their window blocks, on whatever tier (docs/kept_once.md)
PUBLISHED = (*TIERS, WHOLE)


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node as Redis knows it: enough for a router to decide whether to connect. The handshake decides the rest."""

    node_id: str
    epoch: int
    role: Role
    control_address: str
    model_name: str = ""
    num_blocks: int = 0  # capacity of its pool
    block_size: int = 0
    identity_key: bytes = b""  # ModelIdentity.key()

    @property
    def owner(self) -> NodeKey:
        return NodeKey(self.node_id, self.epoch)


class TierChange(msgspec.Struct, frozen=True, array_like=True):
    """Hashes that appeared on and left one tier, concatenated; no hash is in both. `removed` takes effect first."""

    tier: str
    stored: bytes = b""
    removed: bytes = b""


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """Changes of one owner's blocks. `sequence` counts its batches from 1; `reset` makes everything before it void.

    `generation` counts how often the owner had to publish itself anew (Redis was away or emptied); it is shown to
    people."""

    node_id: str
    epoch: int
    generation: int
    sequence: int
    reset: bool
    changes: tuple[TierChange, ...]

    @property
    def owner(self) -> NodeKey:
        return NodeKey(self.node_id, self.epoch)


class NodeUp(msgspec.Struct, frozen=True, kw_only=True, tag="up"):
    """Announces that a node took its lease."""

    record: NodeRecord


class NodeLeft(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """Announces that a node closed on purpose and took its records away."""

    node_id: str
    epoch: int


DirectoryEvent = Batch | NodeUp | NodeLeft

encode = msgspec.msgpack.Encoder().encode
# Decoders raise DecodeError for anything that is no such record, including text that is not UTF-8.
decode_record: WireDecoder[NodeRecord] = WireDecoder(NodeRecord)
decode_event: WireDecoder[DirectoryEvent] = WireDecoder(DirectoryEvent)


@dataclass(frozen=True)
class KeySpace:
    """The names of one cluster's keys; two namespaces share a Redis without seeing each other.

    Raises ConfigError for braces in the namespace, since Redis Cluster would choose slots by them.
    """

    namespace: str

    def __post_init__(self) -> None:
        if not self.namespace or set("{}") & set(self.namespace):
            raise ConfigError(f"--namespace is {self.namespace!r}: it must be a name without braces")

    @property
    def nodes(self) -> str:
        return f"{self.namespace}:nodes"

    @property
    def events(self) -> str:
        return f"{self.namespace}:events"

    def node(self, node_id: str) -> str:
        return f"{self.namespace}:{{{node_id}}}:node"

    def blocks(self, owner: NodeKey, tier: str) -> str:
        return f"{self.namespace}:{{{owner.node_id}}}:kv:{owner.epoch:016x}:{tier}"

    def sequence(self, owner: NodeKey) -> str:
        return f"{self.namespace}:{{{owner.node_id}}}:seq:{owner.epoch:016x}"

    def all_blocks(self, owner: NodeKey) -> list[str]:
        return [self.blocks(owner, each) for each in PUBLISHED]


def join_hashes(hashes: Sequence[bytes]) -> bytes:
    joined = b"".join(hashes)
    assert len(joined) == HASH_BYTES * len(hashes), "block hashes are 16 bytes"
    return joined


def split_hashes(joined: bytes) -> list[bytes]:
    """Splits concatenated 16-byte hashes. Raises ValueError when the length is no multiple of 16."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"{len(joined)} bytes are no whole number of {HASH_BYTES}-byte block hashes")
    return [joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)]
