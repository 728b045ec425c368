"""Who may hand KV to whom, and which heads of which blocks go where. Pure.

Two questions (docs/architecture.md): identities must be *equal*, layouts must be *convertible*. `check_hello` asks both
for a peer that says Hello, `plan` answers the second with the copy that converts one layout into the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from tandem.engine.errors import HandshakeError
from tandem.engine.kv_layout import KVLayout, ModelIdentity
from tandem.engine.messages import WIRE_VERSION, Hello, NodeInfo


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Heads `source_heads` of each source block land in heads `sink_heads` of the sink block, rank to rank."""

    source_rank: int
    sink_rank: int
    source_heads: range
    sink_heads: range


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """How one source rank's blocks become sink blocks. One write unit is (sink block × share), all layers."""

    block_size: int
    num_layers: int
    shares: tuple[HeadShare, ...]


def plan(source: KVLayout, sink: KVLayout) -> TransferPlan:
    """The copy that turns blocks of `source` into blocks of `sink`.

    Raises HandshakeError (source is "ours") naming the first field that forbids it. The block stride may differ: it
    is padding of a pool, not of the bytes that move.
    """
    _require("layout.groups", len(source.groups), len(sink.groups))
    for index, (ours, theirs) in enumerate(zip(source.groups, sink.groups, strict=True)):
        for field in msgspec.structs.fields(ours):
            if field.name != "num_kv_heads":
                name = f"layout.groups[{index}].{field.name}"
                _require(name, getattr(ours, field.name), getattr(theirs, field.name))
        _require(
            f"layout.groups[{index}].num_kv_heads (of all ranks)",
            ours.num_kv_heads * source.tp_size,
            theirs.num_kv_heads * sink.tp_size,
        )
    _require("layout.block_size", source.block_size, sink.block_size)
    _require("layout.tp_size", source.tp_size, sink.tp_size)
    _require("layout.tp_rank", source.tp_rank, sink.tp_rank)
    return TransferPlan(source.block_size, source.group.num_layers, _share_heads(source, sink))


def _share_heads(source: KVLayout, sink: KVLayout) -> tuple[HeadShare, ...]:
    """Intersection of this source rank's heads with every sink rank's, in sink rank order."""
    first = source.tp_rank * source.group.num_kv_heads
    shares = []
    for sink_rank in range(sink.tp_size):
        sink_first = sink_rank * sink.group.num_kv_heads
        low = max(first, sink_first)
        high = min(first + source.group.num_kv_heads, sink_first + sink.group.num_kv_heads)
        if low < high:
            source_heads, sink_heads = range(low - first, high - first), range(low - sink_first, high - sink_first)
            shares.append(HeadShare(source.tp_rank, sink_rank, source_heads, sink_heads))
    return tuple(shares)


def check_identity(ours: ModelIdentity, theirs: ModelIdentity) -> None:
    """Raises HandshakeError naming the first field in which the two models differ."""
    for field in msgspec.structs.fields(ours):
        _require(f"identity.{field.name}", getattr(ours, field.name), getattr(theirs, field.name))


def check_hello(info_ours: NodeInfo, hello: Hello) -> None:
    """Raises HandshakeError when the process that says `hello` can't work with this node.

    Routers carry no layout and take the node's identity; a router that does name an identity must name ours.
    """
    _require("wire_version", WIRE_VERSION, hello.wire_version)
    theirs = hello.info
    if theirs.role == "router" and theirs.identity is None:
        return
    assert info_ours.identity is not None, "a node knows its model before it accepts connections"
    assert info_ours.layout is not None, "a node knows its KV layout before it accepts connections"
    if theirs.identity is None:
        raise HandshakeError("identity", info_ours.identity, None)
    check_identity(info_ours.identity, theirs.identity)
    if theirs.role == "router":
        return
    if theirs.layout is None:
        raise HandshakeError("layout", info_ours.layout, None)
    _check_layout(info_ours.layout, theirs.layout)


def _check_layout(ours: KVLayout, theirs: KVLayout) -> None:
    """The one who says Hello is the source; its `plan` names the fields from the other side."""
    try:
        plan(theirs, ours)
    except HandshakeError as error:
        raise HandshakeError(error.field, error.theirs, error.ours) from None


def _require(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise HandshakeError(field, ours, theirs)
