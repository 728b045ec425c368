"""What a router takes the nodes' caches to hold, when their blocks differ in size."""

from __future__ import annotations

import numpy as np

from tandem.engine.contracts.hashing import every_kth, hash_blocks
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.directory.mirror import Mirror
from tandem.router.nodes.cluster import cached_tokens
from tandem.router.placing.view import NodeView

HASH = 16
HASHES = hash_blocks(np.arange(200, dtype=np.int32), HASH, b"root")


def node(name: str, block_size: int) -> NodeView:
    layout = KVLayout((KVGroup(1, 1, 8, "float32"),), block_size)
    info = NodeInfo(node_id=name, epoch=1, role="unified", control_address=f"tcp://{name}", layout=layout)
    return NodeView(info, Status(node_id=name, epoch=1))


def test_each_node_is_looked_up_by_the_hashes_that_it_publishes() -> None:
    nodes, mirror = [node("small", 16), node("large", 48), node("larger", 64), node("empty", 32)], Mirror()
    for view, num_tokens in zip(nodes, (112, 150, 130, 0), strict=True):
        assert view.info.layout is not None
        block_size = view.info.layout.block_size
        hashes = every_kth(HASHES, block_size // HASH)[: num_tokens // block_size]
        mirror.adopt(view.key)
        mirror.load(view.key, 1, {"gpu": hashes})
    assert cached_tokens(mirror, nodes, HASHES, HASH) == {("small", 1): 112, ("large", 1): 144, ("larger", 1): 128}
