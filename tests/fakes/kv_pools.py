"""Small nodes with a real pool and real transports, grants between them, and what a transfer must leave behind."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import socket
from collections.abc import Sequence

import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.errors import TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.device.kv_pool import allocate_pool
from tandem.kv_connector.transports.base import Transport, Write
from tandem.kv_connector.transports.links.nixl_agent import nixl_problem
from tandem.kv_connector.transports.links.ucx import ucx_problem
from tandem.kv_connector.transports.mapped.processes import host_id
from tandem.kv_connector.transports.node_transports import NodeTransports, make_transports


def needs(transport: str) -> pytest.MarkDecorator:
    """Skips, with the reason, where the package that `transport` stands on is missing."""
    problem = {"nixl": nixl_problem, "ucx": ucx_problem}[transport]()
    return pytest.mark.skipif(bool(problem), reason=problem)


NIXL = pytest.param("nixl", marks=needs("nixl"))
UCX = pytest.param("ucx", marks=needs("ucx"))
ALL = ["local", "shm", NIXL, UCX, "tcp"]
# What these ask of a sink's gate, NIXL fulfils for blocks that travel packed, which these small ones do.
RECEIVER_WRITES = ["local", NIXL, UCX, "tcp"]
KEYS = ClusterKeys(b"a secret for tests", curve=False)


def make_layout(
    heads: int = 2, layers: int = 3, block_size: int = 8, head_dim: int = 4, dtype: str = "float32", padding: int = 0
) -> KVLayout:
    layout = KVLayout((KVGroup(layers, heads, head_dim, dtype),), block_size)
    stride = layout.payload_bytes + padding if padding else 0
    return KVLayout(layout.groups, block_size, block_stride_bytes=stride)


SMALL = make_layout()
MEGABYTE_BLOCKS = make_layout(heads=4, layers=8, block_size=64, head_dim=64)


class PoolNode:
    """A node reduced to its pool and transports. Its pool holds random values from `seed`."""

    def __init__(
        self,
        node_id: str,
        requested: str,
        num_blocks: int = 16,
        layout: KVLayout = SMALL,
        timeout_s: float = PATIENCE_S,
        seed: int = 0,
        keys: ClusterKeys = KEYS,
        device: str = "cpu",
    ) -> None:
        made = make_transports(requested, torch.device(device), keys, "127.0.0.1", timeout_s)
        self.by_name: dict[str, Transport] = {transport.name: transport for transport in made}
        self.transports = NodeTransports(made, requested)
        storage = self.transports.pool_storage(layout.stride_bytes * num_blocks)
        self.pool = allocate_pool(layout, num_blocks, device, storage)
        generator = torch.Generator().manual_seed(seed)
        self.pool.copy_(torch.randn(self.pool.shape, generator=generator).to(self.pool.dtype))
        self.layout = layout
        self.epoch = secrets.randbits(64)
        self.transports.register(self.pool, layout, NodeKey(node_id, self.epoch))
        self.info = NodeInfo(
            node_id=node_id,
            epoch=self.epoch,
            role="unified",
            host_id=host_id(),
            pid=os.getpid(),
            layout=layout,
            transports=self.transports.exports(),
        )
        self.lost: list[tuple[str, int, str]] = []

    def connect(self, sink: NodeInfo):
        return self.transports.connect(self.info, sink, lambda *what: self.lost.append(what))

    def admit(self, source: NodeInfo) -> None:
        self.transports.admit(self.info, source)

    def grant(self, source: NodeInfo, block_ids: Sequence[int], request_id: str = "r", open: bool = True) -> KVGrant:
        grant = grant_of(self.info, source, block_ids, request_id)
        if open:
            self.transports.open_grant(grant)
        return grant

    def close(self) -> None:
        self.transports.close()


def grant_of(sink: NodeInfo, source: NodeInfo, block_ids: Sequence[int], request_id: str = "r") -> KVGrant:
    assert sink.layout is not None
    return KVGrant(
        request_id=request_id,
        attempt=0,
        grant_id=secrets.randbits(64),
        source_id=source.node_id,
        source_epoch=source.epoch,
        sink_id=sink.node_id,
        sink_epoch=sink.epoch,
        first_block=0,
        block_ids=tuple(block_ids),
        num_prompt_tokens=len(block_ids) * sink.layout.block_size,
        lease_s=60.0,
    )


def expected_after(
    before: torch.Tensor,
    source: torch.Tensor,
    pairs: Sequence[tuple[int, int]],
    layers: range | None,
    num_valid: Sequence[int],
) -> torch.Tensor:
    """The sink's pool after one write, slot by slot: written plainly, to check the transports' strided copies."""
    after = before.clone()
    for (source_block, block), valid in zip(pairs, num_valid, strict=True):
        for head in range(before.shape[1]):
            for layer in layers or range(before.shape[2]):
                for plane in range(before.shape[3]):
                    for slot in range(valid):
                        after[block, head, layer, plane, slot] = source[source_block, head, layer, plane, slot]
    return after


def random_write(
    rng: random.Random, num_blocks: int, layout: KVLayout, block_ids: Sequence[int]
) -> tuple[list[tuple[int, int]], range | None, list[int]]:
    """(pairs, layers, num_valid) into some of `block_ids`: whole, one layer or a span, full and partial blocks."""
    destinations = rng.sample(list(block_ids), rng.randint(1, len(block_ids)))
    pairs = [(rng.randrange(num_blocks), block) for block in destinations]
    num_layers = layout.group.num_layers
    first = rng.randrange(num_layers)
    layers = rng.choice([None, range(first, first + 1), range(first, rng.randint(first + 1, num_layers))])
    num_valid = [rng.choice([layout.block_size, rng.randint(1, layout.block_size)]) for _ in pairs]
    return pairs, layers, num_valid


def refused(channel, grant: KVGrant, pairs) -> str:
    """The reason that a write gets, at the write or at the flush."""
    try:
        channel.write(Write(grant, pairs, None, [8] * len(pairs)))
        channel.flush(grant)
    except TransportError as error:
        return error.message
    pytest.fail("the write was taken")


def connected(source: PoolNode, sink: NodeInfo):
    """A channel to `sink`, which may need longer to greet on a busy machine than `source` waits for anything."""
    channels = []

    def connects() -> bool:
        with contextlib.suppress(TransportError):
            channels.append(source.connect(sink))
        return bool(channels)

    wait_until(connects, "a connection")
    return channels[0]


def hangs_up(sock: socket.socket) -> bool:
    """Whether the other side closes, politely or by a reset."""
    sock.settimeout(PATIENCE_S)
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def make_node():
    nodes = []

    def make(*args, **kwargs) -> PoolNode:
        nodes.append(PoolNode(*args, **kwargs))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def make_pair(make_node):
    def make(transport: str, **kwargs):
        source, sink = make_node("p", transport, seed=1, **kwargs), make_node("d", transport, seed=2, **kwargs)
        sink.admit(source.info)
        return source, sink, source.connect(sink.info)

    return make
