from __future__ import annotations

import msgspec
import pytest

from tandem.engine.errors import HandshakeError
from tandem.engine.kv_layout import KVGroup, KVLayout, ModelIdentity
from tandem.engine.messages import WIRE_VERSION, Hello, NodeInfo
from tandem.kv_connector.plan import HeadShare, check_hello, check_identity, plan

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
    assert (made.block_size, made.num_layers) == (64, 4)
    assert made.shares == (HeadShare(0, 0, range(8), range(8)),)


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
        ("dtype", {"dtype": "float16"}),
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


def test_block_size_and_split_over_ranks_are_named():
    with pytest.raises(HandshakeError, match="block_size"):
        plan(LAYOUT, replace(LAYOUT, block_size=128))
    split = replace(LAYOUT, groups=(replace(GROUP, num_kv_heads=4),), tp_size=2)
    with pytest.raises(HandshakeError, match="tp_size"):
        plan(LAYOUT, split)
    with pytest.raises(HandshakeError, match="tp_rank"):
        plan(split, replace(split, tp_rank=1))
    with pytest.raises(HandshakeError, match="groups"):
        plan(LAYOUT, replace(LAYOUT, groups=(GROUP, GROUP)))


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
    check_hello(NODE, Hello(wire_version=WIRE_VERSION, info=NodeInfo(node_id="router", epoch=3, role="router")))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("wire_version", {"wire_version": WIRE_VERSION + 1}),
        ("identity", {"identity": None}),
        ("identity.weights", {"identity": replace(IDENTITY, weights="x")}),
        ("layout", {"layout": None}),
        ("layout.block_size", {"layout": replace(LAYOUT, block_size=16)}),
        ("identity.config", {"role": "router", "identity": replace(IDENTITY, config="x")}),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_by_field(field, changes):
    with pytest.raises(HandshakeError) as caught:
        check_hello(NODE, hello(**changes))
    assert caught.value.field == field


def test_ours_and_theirs_are_not_swapped():
    with pytest.raises(HandshakeError) as caught:
        check_hello(NODE, hello(layout=replace(LAYOUT, block_size=16)))
    assert (caught.value.ours, caught.value.theirs) == (64, 16)
