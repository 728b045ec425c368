"""What a transport's grants let through: the source's and the receiver's gate, closed and forged grants, bad frames."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import msgspec
import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.errors import GrantError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.kv_connector.layouts.geometry import byte_view
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.grants import GrantTable
from tandem.kv_connector.transports.links.tcp_channel import dial
from tandem.kv_connector.transports.links.tcp_wire import WriteFrame, send_frame, send_views
from tandem.kv_connector.transports.links.transport import LinkExport
from tests.fakes.kv_pools import (
    ALL,
    KEYS,
    MEGABYTE_BLOCKS,
    RECEIVER_WRITES,
    PoolNode,
    hangs_up,
    refused,
)


@pytest.mark.parametrize("transport", ALL)
def test_the_source_refuses_blocks_outside_the_grant_and_other_epochs(make_pair, transport):
    source, sink, channel = make_pair(transport)
    grant = sink.grant(source.info, [3, 4])
    before = sink.pool.clone()
    with pytest.raises(GrantError, match="block 5"):
        channel.write(Write(grant, [(0, 3), (1, 5)], None, [8, 8]))
    with pytest.raises(GrantError, match="the channel leads to"):
        channel.write(Write(msgspec.structs.replace(grant, sink_epoch=1), [(0, 3)], None, [8]))
    channel.flush(grant)
    assert torch.equal(sink.pool, before)


@pytest.mark.parametrize("transport", RECEIVER_WRITES)
def test_the_receiver_refuses_foreign_forged_closed_and_replayed_grants(make_node, make_pair, transport):
    source, sink, channel = make_pair(transport)
    other = make_node("p2", transport, seed=3)
    sink.admit(other.info)
    grant = sink.grant(source.info, [3, 4])
    before = sink.pool.clone()
    assert "was given to p" in refused(other.connect(sink.info), grant, [(0, 3)])
    widened = msgspec.structs.replace(grant, block_ids=(3, 4, 5))
    assert "does not cover blocks [5]" in refused(channel, widened, [(0, 5)])
    assert "is not open" in refused(channel, sink.grant(source.info, [7], open=False), [(0, 7)])
    assert torch.equal(sink.pool, before)
    sink.transports.close_grant(grant.grant_id)
    assert "is not open" in refused(channel, grant, [(0, 3)])
    assert torch.equal(sink.pool, before)
    assert sink.by_name[transport].grants.num_refused == 4
    again = sink.grant(source.info, [3])  # the channel survives refusals
    channel.write(Write(again, [(6, 3)], None, [8]))
    channel.flush(again)
    assert torch.equal(sink.pool[3], source.pool[6])
    sink.by_name[transport].grants.check_integrity()


def test_grants_need_an_admitted_source(make_node):
    sink, source = make_node("d", "shm"), make_node("p", "shm")
    with pytest.raises(GrantError, match="not admitted"):
        sink.grant(source.info, [1])


def grant_of(grant_id: int, source_epoch: int = 1) -> KVGrant:
    """For the block of that number."""
    return KVGrant(
        request_id="r", attempt=0, grant_id=grant_id, source_id="p", source_epoch=source_epoch, sink_id="d",
        sink_epoch=2, first_block=0, block_ids=(grant_id,), num_prompt_tokens=8, lease_s=1.0,
    )  # fmt: skip


def test_a_fenced_epoch_gets_no_grants_from_the_gate():
    table = GrantTable()
    table.fence(NodeKey("p", 1))
    with pytest.raises(GrantError, match="is fenced"):
        table.open(grant_of(1))
    table.open(grant_of(2, source_epoch=2))
    table.admit(NodeKey("p", 1))
    table.open(grant_of(3))
    table.check_integrity()


def test_a_source_is_fenced_and_believed_when_every_way_says_so(make_node, monkeypatch):
    """It may have taken any of them."""
    sink, source = make_node("d", "auto"), make_node("p", "auto")
    sink.admit(source.info)
    done, late = Future[None](), Future[None]()
    done.set_result(None)
    for way in (sink.by_name["shm"], sink.by_name["tcp"]):
        monkeypatch.setattr(way, "is_settled", lambda grant_id: False)
        assert not sink.transports.is_settled(1)
        monkeypatch.setattr(way, "is_settled", lambda grant_id: True)
    assert sink.transports.is_settled(1)
    monkeypatch.setattr(sink.by_name["tcp"], "fence", lambda source: late)
    monkeypatch.setattr(sink.by_name["shm"], "fence", sink.by_name["local"].fence)
    fence = sink.transports.fence(source.info.key)
    assert not fence.done()
    late.set_result(None)
    assert fence.done()


def test_closing_a_grant_waits_for_its_writer_only():
    table = GrantTable()
    grants = [grant_of(1), grant_of(2)]
    for grant in grants:
        table.open(grant)
    inside, woken, leave, closed = (threading.Event() for _ in range(4))

    def writer():
        with table.writing(1, NodeKey("p", 1), [1], woken.set):
            inside.set()
            leave.wait(PATIENCE_S)
            assert not closed.is_set()

    def closer():
        table.close(1)
        closed.set()

    threads = [threading.Thread(target=writer)]
    threads[0].start()
    assert inside.wait(PATIENCE_S)
    table.close(2)  # returns: nobody writes under it
    threads.append(threading.Thread(target=closer))
    threads[1].start()
    assert woken.wait(PATIENCE_S)
    assert not closed.wait(0.05)
    leave.set()
    assert closed.wait(PATIENCE_S)
    with pytest.raises(GrantError), table.writing(1, NodeKey("p", 1), [1]):
        pass
    for thread in threads:
        thread.join()
    table.check_integrity()


def raw_connection(source: PoolNode, sink: PoolNode):
    port = msgspec.msgpack.decode(sink.info.transports["tcp"], type=LinkExport).port
    me, peer = (source.info.node_id, source.epoch), (sink.info.node_id, sink.epoch)
    return dial(("127.0.0.1", port), me, peer, KEYS.derive("tcp"), PATIENCE_S)


def test_closing_a_grant_does_not_wait_for_a_stalled_source(make_pair):
    """The source sends the rest only when the grant is closed."""
    source, sink, _ = make_pair("tcp", layout=MEGABYTE_BLOCKS, timeout_s=10 * PATIENCE_S)
    grant = sink.grant(source.info, [0, 1])
    payload = byte_view(source.pool)[: 2 << 20]
    with raw_connection(source, sink) as sock:
        send_frame(sock, WriteFrame(grant.grant_id, (0, 1), 0, 8, (64, 64)), [payload[: 1 << 19]])
        written = source.pool[0].view(-1)[: 1 << 17]
        wait_until(lambda: torch.equal(sink.pool[0].view(-1)[: 1 << 17], written))
        sink.transports.close_grant(grant.grant_id)
        before = sink.pool.clone()
        send_views(sock, [payload[1 << 19 :]])  # late bytes of the closed grant: read and thrown away
        later = sink.grant(source.info, [5])
        send_frame(sock, WriteFrame(later.grant_id, (5,), 0, 8, (64,)), [payload[: 1 << 20]])
        wait_until(lambda: torch.equal(sink.pool[5], source.pool[0]))
    before[5] = source.pool[0]
    assert torch.equal(sink.pool, before)
    assert sink.by_name["tcp"].grants.num_refused == 1


@pytest.mark.parametrize(
    "frame",
    [
        WriteFrame(1, (0,), 0, 4, (8,)),
        WriteFrame(1, (0,), -1, 1, (8,)),
        WriteFrame(1, (0,), 0, 0, (8,)),
        WriteFrame(1, (0,), 0, 1, (9,)),
        WriteFrame(1, (0,), 0, 1, (0,)),
        WriteFrame(1, (0, 1), 0, 1, (8,)),
        WriteFrame(1, (0,) * 6000, 0, 3, (8,) * 6000),
    ],
)
def test_a_frame_that_makes_no_sense_ends_its_connection(make_pair, frame):
    source, sink, _ = make_pair("tcp")
    with raw_connection(source, sink) as sock:
        send_frame(sock, frame)
        assert hangs_up(sock)
