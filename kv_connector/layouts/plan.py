"""Decides which nodes may hand KV to each other, and how a source's blocks become a sink's. Pure.

Two questions (docs/layouts.md): identities must be *equal*, layouts must be *convertible*. `check_hello` asks both
for a peer that says Hello, `plan` answers the second: which tokens of which source block become which slots of which
sink block (`BlockSizes`), and what happens to each number (`Numbers`). Both blocks have all heads of the model: a node
of several ranks is to others like one of one rank (node/pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tandem.engine.contracts.errors import HandshakeError
from tandem.engine.contracts.kv_layout import DTYPE_BYTES, KVGroup, KVLayout, ModelIdentity
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello
from tandem.engine.contracts.wire.parts import NodeInfo

_MAY_DIFFER = ("num_all_kv_heads", "dtype", "k_scales", "v_scales")  # of two groups


class Part(NamedTuple):
    """A run of consecutive tokens: slots of a source block that become slots of a sink block."""

    source_block: int
    source_slot: int
    sink_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """The block sizes of both sides, in tokens. A prompt begins with a block on both; neither size need divide the
    other."""

    source: int
    sink: int

    def num_sink_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.sink)

    def num_valid(self, sink_index: int, num_prompt_tokens: int) -> int:
        """How many slots of the prompt's `sink_index`-th sink block hold tokens of the prompt."""
        return min(self.sink, num_prompt_tokens - sink_index * self.sink)

    def origin(self, sink_index: int, num_valid: int) -> tuple[range, int]:
        """Finds the first `num_valid` tokens of the prompt's `sink_index`-th sink block at the source: the range of the
        prompt's source blocks that hold them, and the slot of the first of these in which they begin."""
        first = sink_index * self.sink
        return range(first // self.source, -(-(first + num_valid) // self.source)), first % self.source

    def parts(self, blocks: Sequence[int], first_slots: Sequence[int], num_valid: Sequence[int]) -> list[list[Part]]:
        """The parts of each sink block. The i-th has `num_valid[i]` tokens, which begin at slot `first_slots[i]` of a
        source block; `blocks` lists the source blocks of every sink block, one sink block after the other."""
        made, ahead = [], iter(blocks)
        for first_slot, valid in zip(first_slots, num_valid, strict=True):
            end = first_slot + valid
            starts = (first_slot, *range(self.source, end, self.source))
            stops = (*range(self.source, end, self.source), end)
            made.append(
                [
                    Part(next(ahead), start % self.source, start - first_slot, stop - start)
                    for start, stop in zip(starts, stops, strict=True)
                ]
            )
        assert next(ahead, None) is None, "more source blocks than the sink blocks are made of"
        return made


@dataclass(frozen=True, slots=True)
class StoredEncoding:
    """The encoding of stored numbers: a dtype, and for fp8 the scales of each layer's keys and values (value = stored *
    scale)."""

    dtype: str
    k_scales: tuple[float, ...] = ()  # one for each layer; (): 1.0 for all
    v_scales: tuple[float, ...] = ()

    @classmethod
    def of(cls, group: KVGroup) -> StoredEncoding:
        return cls(group.dtype, group.k_scales, group.v_scales)


@dataclass(frozen=True, slots=True)
class ReshapePlan:
    """The conversion of source blocks into sink blocks."""

    block_sizes: BlockSizes
    num_layers: int
    source_numbers: StoredEncoding
    sink_numbers: StoredEncoding

    @property
    def keeps_blocks(self) -> bool:
        """Whether a sink block is a source block, byte for byte; only the strides of the pools may differ."""
        sizes = self.block_sizes
        return sizes.source == sizes.sink and self.source_numbers == self.sink_numbers


def plan(source: KVLayout, sink: KVLayout) -> ReshapePlan:
    """Returns the plan that turns blocks of `source` into blocks of `sink`.

    Raises HandshakeError (source is "ours") naming the first field that forbids it. The block stride may differ: it
    is padding of a pool, not of the bytes that move.
    """
    if (source.tp_size, sink.tp_size) != (1, 1):  # a rank's part of a block is told to nobody
        raise HandshakeError("layout.tp_size", source.tp_size, sink.tp_size)
    _require("layout.groups", len(source.groups), len(sink.groups))
    for index, (ours, theirs) in enumerate(zip(source.groups, sink.groups, strict=True)):
        name = f"layout.groups[{index}]"
        for field in msgspec.structs.fields(ours):
            if field.name not in _MAY_DIFFER:
                _require(f"{name}.{field.name}", getattr(ours, field.name), getattr(theirs, field.name))
        _check_numbers(name, ours, theirs)
    if source.group.num_windows:  # what slid out is counted in blocks, and nothing before it is sent
        _require("layout.block_size", source.block_size, sink.block_size)
    if min(source.block_size, sink.block_size) < 1:
        raise HandshakeError("layout.block_size", source.block_size, sink.block_size)
    ours, theirs = source.group, sink.group
    return ReshapePlan(
        BlockSizes(source.block_size, sink.block_size),
        ours.num_layers,
        StoredEncoding.of(ours),
        StoredEncoding.of(theirs),
    )


def _check_numbers(name: str, ours: KVGroup, theirs: KVGroup) -> None:
    """Raises HandshakeError where only one side knows the dtype, which can't be converted then, and where scales are
    not one positive number for each layer."""
    if ours.dtype not in DTYPE_BYTES or theirs.dtype not in DTYPE_BYTES:
        _require(f"{name}.dtype", ours.dtype, theirs.dtype)
    for field in ("k_scales", "v_scales"):
        for group in (ours, theirs):
            scales = getattr(group, field)
            if scales and (len(scales) != group.num_layers or not all(scale > 0 for scale in scales)):
                raise HandshakeError(f"{name}.{field}", getattr(ours, field), getattr(theirs, field))


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
    """Plans as if the peer that says Hello were the source; a refusal names the fields from our side."""
    try:
        plan(theirs, ours)
    except HandshakeError as error:
        raise HandshakeError(error.field, error.theirs, error.ours) from None


def _require(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise HandshakeError(field, ours, theirs)
