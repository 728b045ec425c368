"""What a node must not believe: grants of others, peers that nobody asked for, nodes of another model."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
import torch
import zmq
from impostor_sink import ImpostorSink, sign_grant_for
from split_pair import GREEDY, Pair, make_pair
from waiting import PATIENCE_S

from in_process_cluster import BLOCK, Client, Node, node_options
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.connection import WIRE_VERSION, Hello, Welcome
from tandem.engine.contracts.wire.handoff import KVClaim, KVCommitted, KVDrained, KVReady, KVRefused
from tiny_models import random_prompt, tiny_model


def test_a_grant_that_is_not_for_this_handoff_is_refused() -> None:
    """Shared memory: the source writes wherever its grant says, so a grant that slips through destroys KV."""
    with make_pair("shm") as pair:
        impostor = ImpostorSink(pair)
        pool = pair.decode.process.transfer.pool
        try:
            impostor.submit("good", random_prompt(40, seed=1))
            used = impostor.grant(impostor.expect(KVClaim, "good"))
            impostor.send(used)
            impostor.expect(KVReady, "good")
            impostor.send(KVCommitted(request_id="good", attempt=0, grant_id=used.grant_id))
            pair.until(lambda: pair.source.handoffs_completed == 1)
            before, pushed = pool.clone(), pair.pushed_bytes
            assert pushed > 0, "the impostor's grant is honest and was not used: this test would show nothing"

            result = impostor.submit("bad", random_prompt(40, seed=2))
            claim = impostor.expect(KVClaim, "bad")
            good = impostor.grant(claim)
            keys = pair.decode.process.keys
            forged = [
                msgspec.structs.replace(good, signature=bytes(16)),
                msgspec.structs.replace(good, block_ids=(7, 8, 9)),
                msgspec.structs.replace(used, request_id="bad"),
                keys.sign_grant(msgspec.structs.replace(used, request_id="bad")),
                impostor.grant(claim, source_id="prefill-other"),
                impostor.grant(claim, sink_id="decode-other"),
                impostor.grant(claim, first_block=1),
                impostor.grant(claim, num_prompt_tokens=39),
                impostor.grant(claim, block_ids=()),
            ]
            for number, grant in enumerate(forged, 1):
                impostor.send(grant)
                pair.until(lambda number=number: pair.source.grants_refused == number)  # type: ignore[misc]
            dropped = [
                used,
                impostor.grant(claim, request_id="never"),
                impostor.grant(claim, attempt=1),
                impostor.grant(claim, source_epoch=claim.source_epoch + 1),
                impostor.grant(claim, sink_epoch=claim.sink_epoch + 1),
            ]
            for grant in dropped:
                impostor.send(grant)
            impostor.send(KVRefused(request_id="bad", attempt=0, reason="no"))
            impostor.expect(KVDrained, "bad")
            pair.client.wait(result)
            assert result.failed is not None
            assert pair.pushed_bytes == pushed
            assert torch.equal(pool, before), "something was written under a forged grant"
            pair.check_whole()
        finally:
            impostor.close()


def test_a_grant_from_a_connection_that_nobody_asked_for_is_not_heard(shm: Pair) -> None:
    context, source = zmq.Context(), shm.prefill.process.logic.handoffs.source.counters
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(shm.prefill.info.control_address)
        info = msgspec.structs.replace(shm.decode.info, node_id="decode-stranger", pid=0)
        socket.send(codec.encode(Hello(wire_version=WIRE_VERSION, info=info)))
        assert socket.poll(int(PATIENCE_S * 1000))
        assert isinstance(codec.decode_from_node(socket.recv()), Welcome)
        dropped, pushed = source.messages_dropped, shm.pushed_bytes
        claim = KVClaim(request_id="x", attempt=0, source_id="s", source_epoch=1, sink_epoch=2, num_prompt_tokens=BLOCK)
        socket.send(codec.encode(sign_grant_for(shm, claim)))
        shm.until(lambda: source.messages_dropped == dropped + 1)
        assert shm.pushed_bytes == pushed
    finally:
        socket.close()
        context.term()


@pytest.mark.parametrize(
    ("model", "block_size", "hash_block_size", "transport", "words"),
    [
        ("qwen3", 16, 16, "shm", "identity.config"),
        ("llama", 32, 32, "shm", "identity.hash_block_size"),
        ("llama", 16, 16, "tcp", "give both --transport auto"),
    ],
)
def test_nodes_that_differ_refuse_each_other(
    shm: Pair, model: str, block_size: int, hash_block_size: int, transport: str, words: str
) -> None:
    options = node_options("prefill", tiny_model(model), transport=transport)
    cache = dataclasses.replace(options.cache, block_size=block_size, hash_block_size=hash_block_size)
    stranger = Node(dataclasses.replace(options, cache=cache))
    client = Client(shm.decode.info, stranger.info)
    try:
        result = client.submit(
            f"differs-{model}-{hash_block_size}-{transport}",
            [5] * 40,
            GREEDY,
            decode=shm.decode.info,
            prefill=stranger.info,
        )
        client.wait(result)
        assert result.failed is not None
        assert words in result.failed.message
        key = next(iter(client.results))
        client.cancel(*key, shm.decode.info)
        stranger.wait_until_whole()
    finally:
        shm.check_whole()
        client.close()
        stranger.stop()
