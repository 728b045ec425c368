"""What only NIXL's transport has: direct and packed writes, links that end a source's reach, words that wait for them.

The contract that it shares with the others: test_transports.py, test_transports_processes.py.
"""

from __future__ import annotations

import socket

import msgspec
import numpy as np
import pytest
import torch
from waiting import wait_until

from tandem.engine.contracts.errors import ConfigError, PeerLostError, TransportError
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.layouts.block_slots import NUM_SLOTS
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.links import nixl as nixl_module
from tandem.kv_connector.transports.links.landing_wire import LandFrame
from tandem.kv_connector.transports.links.nixl import MAX_WRITE_BYTES, MIN_RUN_BYTES
from tandem.kv_connector.transports.links.nixl_agent import NixlAgent, nixl_problem, unsafe_ways
from tests.fakes.kv_pools import MEGABYTE_BLOCKS, PoolNode, make_layout, needs

pytestmark = needs("nixl")


@pytest.fixture
def pair(make_node):
    source, sink = (make_node(name, "nixl", layout=MEGABYTE_BLOCKS, seed=seed) for name, seed in (("p", 1), ("d", 2)))
    sink.admit(source.info)
    return source, sink, source.connect(sink.info)


@pytest.fixture
def runs(monkeypatch):
    """Lengths of the descriptors of every NIXL request."""
    seen: list[list[int]] = []
    start = NixlAgent.start_write

    def spy(self, peer: str, local: np.ndarray, *rest):
        seen.append(local[:, 1].tolist())
        return start(self, peer, local, *rest)

    monkeypatch.setattr(NixlAgent, "start_write", spy)
    return seen


def test_blocks_are_few_large_descriptors_and_short_runs_are_packed(pair, runs):
    source, sink, channel = pair
    grant = sink.grant(source.info, range(16))
    expected = sink.pool.clone()
    channel.write(Write(grant, [(0, 4), (1, 5), (2, 6), (9, 1)], None, [64] * 4))
    channel.flush(grant)
    assert runs == [[3 << 20, 1 << 20]], "neighbours on both sides are one descriptor"
    runs.clear()
    channel.write(Write(grant, [(3, 8), (5, 9)], range(2, 3), [64, 64]))  # 32 KiB a head
    channel.write(Write(grant, [(3, 10), (5, 11)], range(2, 6), [64, 64]))  # 128 KiB a head
    channel.write(Write(grant, [(7, 12), (8, 13)], None, [64, 11]))  # one whole block, one that ends a prompt
    channel.flush(grant)
    assert runs == [[2 * 4 * (32 << 10)], [128 << 10] * 8, [1 << 20], [(1 << 20) * 11 // 64]]
    assert all(nbytes >= MIN_RUN_BYTES for request in runs for nbytes in request)
    for there, here in [(4, 0), (5, 1), (6, 2), (1, 9), (12, 7)]:
        expected[there] = source.pool[here]
    for there, here in [(8, 3), (9, 5)]:
        expected[there][:, 2:3] = source.pool[here][:, 2:3]
    for there, here in [(10, 3), (11, 5)]:
        expected[there][:, 2:6] = source.pool[here][:, 2:6]
    expected[13][:, :, :, :11] = source.pool[8][:, :, :, :11]
    assert torch.equal(sink.pool, expected)
    assert channel.max_write_bytes == MAX_WRITE_BYTES


def test_a_direct_write_asks_first(pair):
    source, sink, channel = pair
    before = sink.pool.clone()
    closed = sink.grant(source.info, [3], open=False)
    with pytest.raises(TransportError, match="is not open here"):
        channel.write(Write(closed, [(0, 3)], None, [64]))
    with pytest.raises(TransportError, match="is not open here"):
        channel.flush(closed)
    assert torch.equal(sink.pool, before)
    assert sink.transports.is_settled(closed.grant_id)
    grant = sink.grant(source.info, [3])  # the channel survives a refusal
    channel.write(Write(grant, [(0, 3)], None, [64]))
    channel.flush(grant)
    assert torch.equal(sink.pool[3], source.pool[0])


def test_a_grant_with_direct_writes_is_settled_by_its_flush(pair):
    source, sink, channel = pair
    grant = sink.grant(source.info, [3, 4])
    assert sink.transports.is_settled(grant.grant_id)
    channel.write(Write(grant, [(0, 3)], None, [64]))
    channel.flush(grant)
    assert sink.transports.is_settled(grant.grant_id)
    channel.write(Write(grant, [(1, 4)], None, [64]))
    channel.flush(grant)
    assert source.lost == []
    assert torch.equal(sink.pool[3:5], source.pool[:2])


def test_who_says_drained_without_a_flush_loses_its_link_before_it_is_believed(pair):
    source, sink, channel = pair
    grant = sink.grant(source.info, [3, 4])
    channel.write(Write(grant, [(0, 3)], None, [64]))
    assert not sink.transports.is_settled(grant.grant_id)
    wait_until(lambda: sink.transports.is_settled(grant.grant_id))
    quiet = sink.pool.clone()
    with pytest.raises(PeerLostError):
        channel.flush(grant)
    with pytest.raises(PeerLostError):
        channel.write(Write(grant, [(1, 4)], None, [64]))
    assert [key for key, _ in source.lost] == [NodeKey("d", sink.epoch)]
    assert torch.equal(sink.pool, quiet)


def test_a_newer_link_of_a_source_ends_the_older_one_first(make_node, pair):
    """Otherwise a flush of the new link could speak for writes that still come over the old one."""
    source, sink, channel = pair
    grant = sink.grant(source.info, [3])
    channel.write(Write(grant, [(0, 3)], None, [64]))
    twin = PoolNode("p", "nixl", layout=MEGABYTE_BLOCKS, seed=1)  # the same source, its older link never closed
    twin.by_name["nixl"].pool = source.by_name["nixl"].pool
    newer = twin.connect(sink.info)
    assert sink.transports.is_settled(grant.grant_id), "nothing of the older link is left when the newer one is up"
    newer.write(Write(grant, [(0, 3)], None, [64]))
    newer.flush(grant)
    assert torch.equal(sink.pool[3], source.pool[0])
    twin.close()


def test_more_than_the_window_is_under_way_at_most(pair, monkeypatch):
    source, sink, channel = pair
    monkeypatch.setattr(nixl_module, "WINDOW_BYTES", 2 << 20)
    grant = sink.grant(source.info, range(16))
    for block in range(16):
        channel.write(Write(grant, [(15 - block, block)], None, [64]))
        assert channel._flying_bytes <= 2 << 20
    channel.flush(grant)
    assert torch.equal(sink.pool, source.pool.flip(0))


def test_a_sink_of_another_layout_is_not_written_to(make_node, pair):
    source, sink, _ = pair
    other = make_layout(heads=4, layers=8, block_size=64, head_dim=64, padding=4096)
    with pytest.raises(TransportError, match="does not fit"):
        source.connect(msgspec.structs.replace(sink.info, layout=other))


def test_a_sink_that_cannot_start_nixl_says_so(make_node, pair, monkeypatch):
    """As a TransportError, after which `auto` goes on to the next transport; a lost peer would end the attempt."""
    source, sink, _ = pair

    def fails(self, memory: torch.Tensor) -> None:
        raise TransportError("no locked memory left")

    monkeypatch.setattr(NixlAgent, "register", fails)
    with pytest.raises(TransportError, match="d: no locked memory left") as caught:
        source.connect(sink.info)
    assert not isinstance(caught.value, PeerLostError)


def test_what_is_no_link_ends(pair):
    source, sink, channel = pair
    channel._sock.sendall(b"\x00\x00\x00\x02??")
    grant = sink.grant(source.info, [3])
    with pytest.raises(PeerLostError):
        channel.write(Write(grant, [(0, 3)], None, [64]))
    assert isinstance(channel._sock, socket.socket)
    assert channel._sock.fileno() == -1


@pytest.mark.parametrize(
    "changes",
    [{"slot": NUM_SLOTS}, {"slot": -1}, {"nbytes": 1}, {"first_layer": -1}, {"num_layers": 17}, {"num_valid": (65,)},
     {"num_valid": (0,)}, {"block_ids": (3, 4)}],
    ids=str,
)  # fmt: skip
def test_a_slot_that_holds_no_such_blocks_ends_its_link(pair, changes):
    source, sink, channel = pair
    grant = sink.grant(source.info, [3, 4])
    good = LandFrame(0, grant.grant_id, (3,), 2, 1, (64,), 0, 4 * (32 << 10))
    channel.write(Write(grant, [(0, 3)], range(2, 3), [64]))
    channel.flush(grant)
    before = sink.pool.clone()
    channel._wake()
    channel._ask(msgspec.structs.replace(good, **changes))
    with pytest.raises(PeerLostError):
        channel.flush(grant)
    assert torch.equal(sink.pool, before)


@pytest.mark.parametrize(
    ("ucx_tls", "unsafe"),
    [
        ("^cma,xpmem,knem,cuda_ipc", []),
        ("rc,cuda_copy", []),
        ("tcp", []),
        ("all", ["all"]),
        ("rc,sm", ["sm"]),
        ("tcp,cma", ["cma"]),
        ("^cma", ["xpmem", "knem", "cuda_ipc"]),
    ],
)
def test_ways_that_outlive_a_fence_are_not_allowed(monkeypatch, ucx_tls, unsafe):
    assert unsafe_ways(ucx_tls) == unsafe
    monkeypatch.setenv("UCX_TLS", ucx_tls)
    assert all(name in nixl_problem() for name in unsafe)
    if unsafe:
        with pytest.raises(ConfigError, match="could still write"):
            PoolNode("x", "nixl")
        assert "nixl" not in PoolNode("y", "auto").info.transports
