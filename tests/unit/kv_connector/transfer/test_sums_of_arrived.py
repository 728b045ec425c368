"""Sums that a sink begins when a KVReady comes, ahead of the step loop's Verify: which Verify gets them, and which not.

That a Verify got them is seen by a block that is changed in between."""

from __future__ import annotations

import msgspec
import pytest
from waiting import PATIENCE_S

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.engine.contracts.wire.parts import Continuation
from tandem.kernels.blocks.digest import block_digests
from tandem.kv_connector.protocol.jobs import Verified, Verify, digest_key
from tests.fakes.kv_pools import PoolNode
from tests.fakes.transfer_side import Side

KEY = AttemptKey("r", 0)
SIZE = 8


@pytest.fixture
def sink():
    side = Side(PoolNode("d", "local", seed=2))
    yield side
    assert side.transfer.stop(PATIENCE_S)
    side.node.close()


class Arrived:
    """A prompt in three blocks of the sink, of the last one `num_last` slots, and its source's word."""

    def __init__(self, sink: Side, num_last: int = SIZE) -> None:
        self.sink, self.num_last, self.answers = sink, num_last, 0
        grant = sink.node.grant(sink.node.info, [4, 9, 2], open=False)
        self.grant: KVGrant = msgspec.structs.replace(grant, num_prompt_tokens=2 * SIZE + num_last)
        self.key = digest_key(KEY, grant.grant_id)
        self.digests = block_digests(sink.node.pool, [4, 9, 2], self.key, num_last, SIZE).numpy().tobytes()
        sink.transfer.sink_checks.expect(self.grant)

    def ready(self, **changes) -> KVReady:
        said = KVReady(
            request_id="r", attempt=0, grant_id=self.grant.grant_id, grant_signature=self.grant.signature,
            source_id="p", source_epoch=1, sink_epoch=2, first_tokens=(), digests=self.digests,
        )  # fmt: skip
        return msgspec.structs.replace(said, **changes)

    def verified(self, round: int = 0) -> tuple[int, ...]:
        grant = self.grant
        self.sink.transfer.submit(
            Verify(KEY, grant.grant_id, round, grant.block_ids, self.digests, self.key, self.num_last)
        )
        self.answers += 1
        return self.sink.wait_for(Verified, self.answers).bad_indices

    def change(self) -> None:
        """What has been asked of the thread is done before."""
        self.sink.transfer.submit(Verify(("other", 0), 0, 0, (4,), b"", 0, SIZE))
        self.answers += 1
        self.sink.wait_for(Verified, self.answers)
        self.sink.node.pool[9] += 1


@pytest.mark.parametrize("num_last", [1, SIZE])
def test_a_verify_compares_what_was_there_when_the_word_came(sink, num_last) -> None:
    arrived = Arrived(sink, num_last)
    assert not sink.transfer.hear(arrived.ready()), "the step loop decides"
    arrived.change()
    assert arrived.verified() == ()
    assert arrived.verified() == (1,), "sums serve one Verify"


def test_a_repeated_word_is_summed_again(sink) -> None:
    arrived = Arrived(sink)
    sink.transfer.hear(arrived.ready())
    arrived.change()
    sink.transfer.hear(arrived.ready())
    assert arrived.verified() == (1,)


def test_blocks_that_were_sent_again_are_summed_again(sink) -> None:
    arrived = Arrived(sink)
    sink.transfer.hear(arrived.ready())
    arrived.change()
    assert arrived.verified(round=1) == (1,)


@pytest.mark.parametrize(
    "changes",
    [
        {"grant_signature": b"another"},
        {"grant_id": 5},
        {"digests": b""},
        {"continuation": Continuation(num_tokens=20, token_ids=())},
    ],
    ids=["signature", "grant", "no-digests", "running"],
)
def test_other_words_are_not_heard(sink, changes) -> None:
    arrived = Arrived(sink)
    sink.transfer.hear(arrived.ready(**changes))
    arrived.change()
    assert arrived.verified() == (1,)


def test_nothing_is_kept_of_grants_that_have_ended(sink) -> None:
    ended, other = Arrived(sink), Arrived(sink)
    sink.transfer.hear(ended.ready())
    other.change()
    sink.transfer.sink_checks.end(ended.grant.grant_id)
    sink.transfer.hear(ended.ready())
    assert other.verified() == (1,)
    assert sink.transfer.sink_checks.num_arrived == 0


def test_a_grant_of_blocks_that_there_are_not_is_verified_all_the_same(sink) -> None:
    arrived = Arrived(sink)
    arrived.grant = msgspec.structs.replace(arrived.grant, block_ids=(4, 99, 2))
    sink.transfer.sink_checks.expect(arrived.grant)
    sink.transfer.hear(arrived.ready())
    assert arrived.verified() == (0, 1, 2)
