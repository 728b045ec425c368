"""Hand-off messages that are well formed and make no sense: they are dropped, and no block is lost by them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from pull_world import PullNode

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.errors import DecodeError
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire import codec
from tandem.engine.contracts.wire.handoff import KVClaim, KVDrained, KVGrant, KVPull, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import Candidates, Continuation, FirstToken, NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kv_connector.protocol.outcomes import Commit
from tandem.kv_connector.sink.manager import SinkManager
from tandem.node.control.events import Received
from tandem.node.requests import RequestBook
from tandem.node.serving import ServingNode
from tests.fakes.handoff_effects import take, take_messages
from tests.fakes.made_requests import made_request

SOURCE, BLOCK, VOCAB = NodeKey("p", 7), 4, 100


def sink_of(pool: BlockPool, with_digests: bool = True) -> SinkManager:
    cache = CacheOptions(block_size=BLOCK, hash_block_size=BLOCK)
    options = NodeOptions("decode", ModelOptions("m"), cache, digests=with_digests)
    info = NodeInfo(node_id="d", epoch=9, role="decode", vocab_size=VOCAB, max_model_len=40)
    return SinkManager(info, ClusterKeys(b"k" * 16, False), pool, options)


def expect(
    sink: SinkManager,
    num_tokens: int,
    samples: tuple[int, ...] = (0,),
    is_running: bool = False,
    beam_width: int = 0,
) -> None:
    prompt = np.zeros(num_tokens, np.int32)
    submit = Submit(
        request_id="r", attempt=0, mode="decode", prompt_token_ids=prompt.tobytes(), sampling=SamplingParams(),
        peer=PeerRef("p", 7, ""), sample_indices=samples, is_running=is_running,
    )  # fmt: skip
    sampling = SamplingParams(beam_width=beam_width)
    sink.expect(submit, made_request("r", prompt, sampling, samples=samples), 0.0)


def claim(sink: SinkManager, num_tokens: int) -> KVGrant:
    message = KVClaim(
        request_id="r", attempt=0, source_id="p", source_epoch=7, sink_epoch=9, num_prompt_tokens=num_tokens
    )
    sink.on_message(SOURCE, message, 1.0)
    sink.on_tick(1.0)
    (grant,) = [sent for _, sent in take_messages(sink) if isinstance(sent, KVGrant)]
    return grant


@pytest.mark.parametrize(
    ("candidates", "width", "is_heard"),
    [
        (Candidates((5, 6), (-1.0, -2.0)), 2, True),
        (Candidates((), ()), 2, True),
        (None, 2, False),
        (Candidates((5, 6), (-1.0, -2.0)), 0, False),
        (Candidates((5, VOCAB), (-1.0, -2.0)), 2, False),
        (Candidates((5, 6), (-1.0,)), 2, False),
    ],
)
def test_ready_has_candidates_where_beams_are_searched_and_nowhere_else(candidates, width, is_heard):
    sink = sink_of(BlockPool(30, enable_caching=True))
    expect(sink, 18, beam_width=width)
    tokens = (FirstToken(0, 5, False, candidates),)
    assert says_ready(sink, claim(sink, 18), first_tokens=tokens) == is_heard


@pytest.mark.parametrize("num_claimed", [1, 5, 17])
def test_a_claim_for_a_running_sequence_is_no_shorter_than_its_prompt(num_claimed):
    """With more of the prompt cached here than is claimed, the number of blocks to grant would be negative."""
    pool = BlockPool(30, enable_caching=True)
    sink = sink_of(pool)
    expect(sink, 18, is_running=True)
    grant = claim(sink, num_claimed)
    assert len(grant.block_ids) == 5
    assert pool.num_free == 25
    sink.check_integrity()


@pytest.mark.parametrize(
    ("first_tokens", "is_heard"),
    [
        ((FirstToken(0, 5, False), FirstToken(1, VOCAB - 1, False)), True),
        ((FirstToken(0, 5, False), FirstToken(1, VOCAB, False)), False),
        ((FirstToken(0, 5, False), FirstToken(0, 5, False)), False),
        ((FirstToken(2, 5, False),), False),
    ],
)
def test_ready_names_tokens_of_the_model_and_each_sample_once(first_tokens, is_heard):
    sink = sink_of(BlockPool(30, enable_caching=True))
    expect(sink, 18, samples=(0, 1))
    assert says_ready(sink, claim(sink, 18), first_tokens=first_tokens) == is_heard


@pytest.mark.parametrize(
    ("num_known", "token_id", "is_heard"), [(2, 5, True), (2, VOCAB, False), (1, 5, True), (23, 5, False)]
)
def test_a_continuation_is_of_the_model_and_no_longer_than_it_takes(num_known, token_id, is_heard):
    sink = sink_of(BlockPool(30, enable_caching=True))
    expect(sink, 18, is_running=True)
    grant = claim(sink, 80)
    continuation = Continuation(18 + num_known - 1, (token_id,) * num_known)
    assert says_ready(sink, grant, first_tokens=(), continuation=continuation) == is_heard


@pytest.mark.parametrize("with_digests", [True, False])
def test_a_running_sequence_gives_back_what_its_grant_had_beyond_its_length(with_digests):
    pool = BlockPool(30, enable_caching=True)
    sink = sink_of(pool, with_digests)
    expect(sink, 18, is_running=True)
    grant = claim(sink, 39)
    assert len(grant.block_ids) == 10
    ready(sink, grant, first_tokens=(), continuation=Continuation(20, (5, 5, 5)), digests=bytes(40 * with_digests))
    assert pool.num_free == 25
    assert [commit.block_ids for commit in take(sink, Commit)] == ([] if with_digests else [grant.block_ids[:5]])
    sink.check_integrity()


def says_ready(sink: SinkManager, grant: KVGrant, **fields: object) -> bool:
    """Whether what arrived is being checked."""
    ready(sink, grant, digests=bytes(8 * len(grant.block_ids)), **fields)
    assert sink.counters.foreign_messages == (not sink.actions.num_verifying)
    return bool(sink.actions.num_verifying)


def ready(sink: SinkManager, grant: KVGrant, **fields: object) -> None:
    message = KVReady(
        request_id="r", attempt=0, grant_id=grant.grant_id, grant_signature=grant.signature, source_id="p",
        source_epoch=7, sink_epoch=9, **fields,
    )  # fmt: skip
    sink.on_message(SOURCE, message, 2.0)


def test_counts_and_durations_are_bounded_where_they_are_decoded():
    pull = KVPull(
        request_id="r", attempt=0, source_epoch=1, sink_epoch=2, first_block=0, block_hashes=b"", deadline_s=1.0
    )
    for change in ({"first_block": -1}, {"first_block": 1 << 40}, {"deadline_s": float("nan")}, {"deadline_s": 1e300}):
        with pytest.raises(DecodeError):
            codec.decode_to_node(codec.encode(msgspec.structs.replace(pull, **change)))


def test_a_pull_cannot_take_the_name_of_a_hand_off():
    node = PullNode("h", 14)
    peer = msgspec.structs.replace(node.info, node_id="a", epoch=5)
    node.source.peers.connected(peer)
    node.source.expect(AttemptKey("r", 0), PeerRef("d", 3, ""), 20, 60.0)
    pull = KVPull(
        request_id="r", attempt=0, source_epoch=node.info.epoch, sink_epoch=5, first_block=0,
        block_hashes=bytes(16), deadline_s=1.0,
    )  # fmt: skip
    node.pull_server.on_pull(NodeKey("a", 5), pull, 0.0)
    assert [type(sent) for _, sent in node.pull_server.drain_outbox()] == [KVRelease]


def test_what_a_router_says_of_kv_is_not_heard():
    """Whoever is granted blocks is fenced when it is lost; a router is not."""
    node = PullNode("d", 14)
    scheduler = Scheduler(SchedulerState(
        SchedulerOptions(), node.pool, block_size=BLOCK, max_model_len=256, eos_token_ids=[],
        root_for_salt=lambda salt: bytes(16),
    ))  # fmt: skip
    logic = ServingNode(node.info, RequestBook(100, 64), scheduler, node.pool, 4, node.handoffs)
    router = NodeKey("router", 1)
    for message in (
        KVClaim(
            request_id="r", attempt=0, source_id="router", source_epoch=1, sink_epoch=node.info.epoch,
            num_prompt_tokens=8,
        ),
        KVDrained(request_id="r", attempt=0, source_epoch=1, grant_id=0),
    ):  # fmt: skip
        logic.on_control(Received(router, message), 0.0)
    assert node.sink.counters.foreign_messages == 2
    assert logic.drain_outbox() == []
