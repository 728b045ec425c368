from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.errors import HandshakeError
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout, ModelIdentity
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.layouts.plan import BlockSizes, StoredEncoding, check_hello, check_identity, plan

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
    assert made.keeps_blocks


def test_padding_of_a_pool_is_no_obstacle():
    padded = replace(LAYOUT, block_stride_bytes=LAYOUT.payload_bytes + 4096)
    assert plan(LAYOUT, padded) == plan(LAYOUT, LAYOUT)


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
    assert plan(LAYOUT, fp8).sink_numbers == StoredEncoding("float8_e4m3fn", (0.5,) * 4)
    assert not any(plan(LAYOUT, other).keeps_blocks for other in (larger, fp8))
    with pytest.raises(HandshakeError, match="groups"):
        plan(LAYOUT, replace(LAYOUT, groups=(GROUP, GROUP)))
    with pytest.raises(HandshakeError, match="block_size"):
        plan(LAYOUT, replace(LAYOUT, block_size=0))


SIZES = st.integers(1, 7).map(lambda n: 4 * n)


def content(num_tokens: int, layers: int) -> np.ndarray:
    """[tokens, layers] of numbers that are nowhere the same."""
    token, layer = np.ogrid[1 : num_tokens + 1, :layers]
    return token * 100 + layer


def in_blocks(values: np.ndarray, block_size: int) -> np.ndarray:
    """[tokens, layers] -> [blocks, layers, block_size]; 0 where no token is."""
    num_blocks = -(-len(values) // block_size)
    padded = np.zeros((num_blocks * block_size, *values.shape[1:]), values.dtype)
    padded[: len(values)] = values
    return padded.reshape(num_blocks, block_size, *values.shape[1:]).transpose(0, 2, 1)


def reshape(sizes: BlockSizes, kept: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(what the sink holds, how often each of its places was written)."""
    shape = (sizes.num_sink_blocks(num_tokens), kept.shape[1], sizes.sink)
    held, writes = np.zeros(shape, int), np.zeros(shape, int)
    for index in range(shape[0]):
        valid = sizes.num_valid(index, num_tokens)
        origin, first_slot = sizes.origin(index, valid)
        (parts,) = sizes.parts(origin, [first_slot], [valid])
        for part in parts:
            there = index, slice(None), slice(part.sink_slot, part.sink_slot + part.num_slots)
            held[there] = kept[part.source_block][:, part.source_slot : part.source_slot + part.num_slots]
            writes[there] += 1
    return held, writes


@given(st.integers(1, 100), SIZES, SIZES)
@settings(deadline=None, derandomize=True, max_examples=60)
def test_each_number_lands_exactly_once_and_the_way_back_restores_it(tokens: int, ours: int, theirs: int) -> None:
    values = content(tokens, GROUP.num_layers)
    kept, expected = in_blocks(values, ours), in_blocks(values, theirs)
    held, writes = reshape(BlockSizes(ours, theirs), kept, tokens)
    assert np.array_equal(held, expected)
    assert np.array_equal(writes, (expected > 0).astype(int)), "written twice, or where no token is"
    back, _ = reshape(BlockSizes(theirs, ours), held, tokens)
    assert np.array_equal(back, kept)


def test_ranks_that_hold_copies_of_heads_hand_nothing_over_even_to_their_like() -> None:
    ranks = replace(LAYOUT, tp_size=2)
    for source, sink in ((ranks, ranks), (ranks, LAYOUT), (LAYOUT, ranks)):
        with pytest.raises(HandshakeError) as caught:
            plan(source, sink)
        assert caught.value.field == "layout.tp_size"


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
