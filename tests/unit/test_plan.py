from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.errors import HandshakeError
from tandem.engine.kv_layout import KVGroup, KVLayout, ModelIdentity
from tandem.engine.messages import WIRE_VERSION, Hello, NodeInfo
from tandem.kv_connector.plan import BlockSizes, HeadShare, Numbers, check_hello, check_identity, plan

GROUP = KVGroup(num_layers=4, num_kv_heads=8, head_dim=16, dtype="bfloat16")
LAYOUT = KVLayout((GROUP,), block_size=64)
IDENTITY = ModelIdentity(config="c", weights="w", tokenizer="t", rope="r")
NODE = NodeInfo(node_id="d", epoch=1, role="decode", identity=IDENTITY, layout=LAYOUT)
SOURCE = NodeInfo(node_id="p", epoch=2, role="prefill", identity=IDENTITY, layout=LAYOUT)


def replace(struct, **changes):
    return msgspec.structs.replace(struct, **changes)


def hello(**changes) -> Hello:
    return Hello(wire_version=changes.pop("wire_version", WIRE_VERSION), info=replace(SOURCE, **changes))


def test_equal_layouts_convert_whole_blocks():
    made = plan(LAYOUT, LAYOUT)
    assert (made.block_sizes, made.num_layers) == (BlockSizes(64, 64), 4)
    assert made.shares == (HeadShare(0, 0, range(8), range(8)),)
    assert made.keeps_blocks


def test_padding_of_a_pool_is_no_obstacle():
    padded = replace(LAYOUT, block_stride_bytes=LAYOUT.payload_bytes + 4096)
    assert plan(LAYOUT, padded) == plan(LAYOUT, LAYOUT)


def test_each_rank_sends_its_own_heads_to_the_same_rank():
    rank_1 = replace(LAYOUT, groups=(replace(GROUP, num_kv_heads=4),), tp_size=2, tp_rank=1)
    assert plan(rank_1, rank_1).shares == (HeadShare(1, 1, range(4), range(4)),)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("num_layers", {"num_layers": 5}),
        ("num_kv_heads", {"num_kv_heads": 4}),
        ("head_dim", {"head_dim": 8}),
        ("dtype", {"dtype": "float64"}),
        ("k_scales", {"k_scales": (1.0,)}),
        ("v_scales", {"v_scales": (1.0, 1.0, 1.0, 0.0)}),
        ("kind", {"kind": "latent"}),
        ("num_planes", {"num_planes": 1}),
        ("window", {"window": 128}),
    ],
)
def test_a_group_that_differs_is_named(field, changes):
    other = replace(LAYOUT, groups=(replace(GROUP, **changes),))
    with pytest.raises(HandshakeError) as caught:
        plan(LAYOUT, other)
    assert field in caught.value.field
    assert caught.value.ours == getattr(GROUP, field)
    assert caught.value.theirs == changes[field]


def test_what_differs_and_can_be_converted_is_in_the_plan():
    larger = replace(LAYOUT, block_size=128)
    assert plan(LAYOUT, larger).block_sizes == BlockSizes(64, 128)
    fp8 = replace(LAYOUT, groups=(replace(GROUP, dtype="float8_e4m3fn", k_scales=(0.5,) * 4),))
    assert plan(LAYOUT, fp8).sink_numbers == Numbers("float8_e4m3fn", (0.5,) * 4)
    assert not any(plan(LAYOUT, other).keeps_blocks for other in (larger, fp8, ranks(LAYOUT, 2)[0]))
    with pytest.raises(HandshakeError, match="groups"):
        plan(LAYOUT, replace(LAYOUT, groups=(GROUP, GROUP)))
    with pytest.raises(HandshakeError, match="block_size"):
        plan(LAYOUT, replace(LAYOUT, block_size=0))


def ranks(layout: KVLayout, size: int) -> list[KVLayout]:
    """The layouts of a node of `size` ranks that serves the model of `layout`, a node of one."""
    every = layout.group.num_kv_heads
    own = replace(layout.group, num_kv_heads=max(1, every // size), num_all_kv_heads=every)
    return [replace(layout, groups=(own,), tp_size=size, tp_rank=rank) for rank in range(size)]


def heads_of(layout: KVLayout) -> list[int]:
    """Of the model, written out from what docs/tensor_parallelism.md says."""
    every, own = layout.group.num_all_kv_heads, layout.group.num_kv_heads
    if every >= layout.tp_size:
        return list(range(layout.tp_rank * own, (layout.tp_rank + 1) * own))
    return [layout.tp_rank // (layout.tp_size // every)]


SIZES = st.integers(1, 7).map(lambda n: 4 * n)
RANKS = st.sampled_from((1, 2, 4, 8))


def content(num_tokens: int, heads: list[int], layers: int) -> np.ndarray:
    """[tokens, heads, layers] of numbers that are nowhere the same."""
    token, head, layer = np.ogrid[1 : num_tokens + 1, : max(heads) + 1, :layers]
    return (token * 1000 + head * 10 + layer)[:, heads]


def in_blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """[tokens, heads, layers] -> [blocks, heads, layers, block_size]; 0 where no token is."""
    num_blocks = -(-len(values) // block_size)
    padded = np.zeros((num_blocks * block_size, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded.reshape(num_blocks, block_size, *values.shape[1:]).transpose(0, 2, 3, 1)


def reshape(sources: list[KVLayout], sinks: list[KVLayout], kept: list[np.ndarray], num_tokens: int):
    """(what the sinks hold, how often each of their places was written), from `kept` of each source rank."""
    sizes = BlockSizes(sources[0].block_size, sinks[0].block_size)
    shape = (sizes.num_sink_blocks(num_tokens), sinks[0].group.num_kv_heads, GROUP.num_layers, sizes.sink)
    held, writes = [np.zeros(shape, int) for _ in sinks], [np.zeros(shape, int) for _ in sinks]
    for source, blocks in zip(sources, kept, strict=True):
        for share in plan(source, sinks[0]).shares:
            ours, theirs = as_slice(share.source_heads), as_slice(share.sink_heads)
            for index in range(shape[0]):
                valid = sizes.num_valid(index, num_tokens)
                origin, first_slot = sizes.origin(index, valid)
                (parts,) = sizes.parts(origin, [first_slot], [valid])
                for part in parts:
                    there = index, theirs, slice(None), slice(part.sink_slot, part.sink_slot + part.num_slots)
                    slots = slice(part.source_slot, part.source_slot + part.num_slots)
                    held[share.sink_rank][there] = blocks[part.source_block][ours, :, slots]
                    writes[share.sink_rank][there] += 1
    return held, writes


def as_slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


@given(st.integers(1, 100), SIZES, SIZES, RANKS, RANKS, st.sampled_from((2, 8)))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_each_number_lands_exactly_once_and_the_way_back_restores_it(tokens, ours, theirs, sources, sinks, heads):
    model = replace(LAYOUT, groups=(replace(GROUP, num_kv_heads=heads),))
    source_ranks = ranks(replace(model, block_size=ours), sources)
    sink_ranks = ranks(replace(model, block_size=theirs), sinks)
    kept = [in_blocks(content(tokens, heads_of(rank), GROUP.num_layers), ours) for rank in source_ranks]
    held, writes = reshape(source_ranks, sink_ranks, kept, tokens)
    for rank, blocks, counts in zip(sink_ranks, held, writes, strict=True):
        expected = in_blocks(content(tokens, heads_of(rank), GROUP.num_layers), theirs)
        assert np.array_equal(blocks, expected)
        assert np.array_equal(counts, (expected > 0).astype(int)), "written twice, or where no token is"
    back, _ = reshape(sink_ranks, source_ranks, held, tokens)
    assert all(np.array_equal(again, first) for again, first in zip(back, kept, strict=True))


def test_ranks_with_copies_of_a_head_share_the_work():
    two_heads = replace(LAYOUT, groups=(replace(GROUP, num_kv_heads=2),))
    sources, sinks = ranks(two_heads, 4), ranks(two_heads, 8)
    assert [[share.sink_rank for share in plan(source, sinks[0]).shares] for source in sources] == [
        [0, 2],
        [1, 3],
        [4, 6],
        [5, 7],
    ]


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(ModelIdentity)])
def test_identity_names_the_field_and_both_values(field):
    value = 128 if field == "hash_block_size" else "another"
    with pytest.raises(HandshakeError) as caught:
        check_identity(IDENTITY, replace(IDENTITY, **{field: value}))
    assert caught.value.field == f"identity.{field}"
    assert repr(getattr(IDENTITY, field)) in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_matching_hello_passes():
    check_hello(NODE, hello())
    check_hello(NODE, hello(layout=replace(LAYOUT, block_size=16)))
    check_hello(NODE, Hello(wire_version=WIRE_VERSION, info=NodeInfo(node_id="router", epoch=3, role="router")))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("wire_version", {"wire_version": WIRE_VERSION + 1}),
        ("identity", {"identity": None}),
        ("identity.weights", {"identity": replace(IDENTITY, weights="x")}),
        ("layout", {"layout": None}),
        ("layout.groups[0].head_dim", {"layout": replace(LAYOUT, groups=(replace(GROUP, head_dim=8),))}),
        ("layout.tp_size", {"layout": replace(LAYOUT, groups=(replace(GROUP, num_kv_heads=4),), tp_size=2)}),
        ("identity.config", {"role": "router", "identity": replace(IDENTITY, config="x")}),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_field(field, changes):
    with pytest.raises(HandshakeError) as caught:
        check_hello(NODE, hello(**changes))
    assert caught.value.field == field


def test_ours_and_theirs_are_not_swapped():
    with pytest.raises(HandshakeError) as caught:
        check_hello(NODE, hello(layout=replace(LAYOUT, groups=(replace(GROUP, head_dim=8),))))
    assert (caught.value.ours, caught.value.theirs) == (16, 8)
