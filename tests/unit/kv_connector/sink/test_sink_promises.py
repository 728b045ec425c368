"""What a node that also computes for its sources promises them of its pool (docs/blocks.md)."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVClaim, KVGrant, KVRefused
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.kv_connector.sink.manager import SinkManager
from tests.fakes.handoff_effects import take_messages
from tests.fakes.made_requests import made_request

PEER = NodeKey("peer", 7)
BLOCK = 4


class Sink:
    """Of ten blocks."""

    def __init__(self) -> None:
        self.pool = BlockPool(10, enable_caching=True)
        options = NodeOptions("unified", ModelOptions("m"), CacheOptions(block_size=BLOCK, hash_block_size=BLOCK))
        info = NodeInfo(node_id="own", epoch=9, role="unified")
        self.manager = SinkManager(info, ClusterKeys(b"k" * 16, False), self.pool, options, lambda grant_id: True)

    def cache(self, hashes: list[bytes]) -> None:
        blocks = self.pool.allocate(len(hashes))
        assert blocks is not None
        for index, block in enumerate(blocks):
            self.pool.register(block, hashes[index], hashes[index - 1] if index else None)
        self.pool.free(blocks, None)

    def claims(self, name: str, num_blocks: int, hashes: list[bytes]) -> bool:
        """Whether a prompt is granted at once."""
        prompt = np.zeros(num_blocks * BLOCK, np.int32)
        submit = Submit(
            request_id=name, attempt=0, mode="decode", prompt_token_ids=prompt.tobytes(), sampling=SamplingParams(),
            peer=PeerRef(*PEER, ""),
        )  # fmt: skip
        self.manager.expect(submit, made_request(name, prompt, hashes=hashes), 0.0)
        return any(isinstance(answer, KVGrant) for answer in self.claim(name, num_blocks))

    def claim(self, name: str, num_blocks: int) -> list[object]:
        message = KVClaim(
            request_id=name, attempt=0, source_id=PEER.node_id, source_epoch=PEER.epoch, sink_epoch=9,
            num_prompt_tokens=num_blocks * BLOCK,
        )  # fmt: skip
        self.manager.on_message(PEER, message, 1.0)
        return self.sent()

    def sent(self) -> list[object]:
        return [message for _, message in take_messages(self.manager)]


def hashes_of(letter: str, num: int) -> list[bytes]:
    return [f"{letter}{index}".encode().ljust(16, b".") for index in range(num)]


@pytest.mark.parametrize(("prefixes", "granted"), [("aaa", "xyz"), ("abc", "x"), ("aab", "xy")])
def test_hits_count_as_promised_and_what_several_share_counts_once(prefixes: str, granted: str) -> None:
    """Each prompt is two cached blocks and one that is granted; half of the pool is five."""
    sink = Sink()
    for prefix in sorted(set(prefixes)):
        sink.cache(hashes_of(prefix, 2))
    pairs = zip("xyz", prefixes, strict=True)
    assert "".join(name for name, prefix in pairs if sink.claims(name, 3, hashes_of(prefix, 2))) == granted
    sink.manager.check_integrity()


def test_a_prompt_is_promised_whatever_it_takes_if_nothing_else_is() -> None:
    assert Sink().claims("large", 8, [])


@pytest.mark.parametrize(("num_blocks", "answer"), [(2, KVGrant), (6, KVRefused)])
def test_a_pull_has_its_answer_while_the_line_waits_for_promised_blocks(num_blocks: int, answer: type) -> None:
    """What its peer offers is held until then, and may be what the promised prompt lacks there."""
    sink = Sink()
    assert sink.claims("first", 5, [])
    assert not sink.claims("second", 1, [])
    sink.manager.fetch(AttemptKey("pull", 0), PeerRef(*PEER, ""), num_blocks, 100.0, 1.0)
    assert type(sink.claim("pull", num_blocks)[-1]) is answer


def test_a_chunk_has_its_blocks_while_the_line_waits_for_some() -> None:
    """Who is first in line may wait for the blocks of the very request that the chunk is for, which holds most."""
    sink = Sink()
    own = sink.pool.allocate_grantable(7)
    assert own is not None
    assert not sink.claims("waits", 5, [])
    sink.manager.fetch(AttemptKey("chunk", 0), PeerRef(*PEER, ""), 2, 100.0, 1.0, own[4:6])
    (grant,) = [answer for answer in sink.claim("chunk", 2) if isinstance(answer, KVGrant)]
    assert list(grant.block_ids) == own[4:6]
    sink.manager.check_integrity()


@pytest.mark.parametrize("has_blocks", [False, True])
def test_a_claim_that_comes_before_its_pull_is_granted_in_its_size(has_blocks: bool) -> None:
    """One helper of a prompt may claim at another before that one hears of the prompt."""
    sink = Sink()
    assert not any(isinstance(answer, KVGrant) for answer in sink.claim("pull", 2))
    into = sink.pool.allocate_grantable(2) if has_blocks else []
    assert into is not None
    sink.manager.fetch(AttemptKey("pull", 0), PeerRef(*PEER, ""), 2, 100.0, 1.0, into)
    (grant,) = [message for message in sink.sent() if isinstance(message, KVGrant)]
    assert (grant.num_prompt_tokens, len(grant.block_ids)) == (2 * BLOCK, 2)


def test_a_claim_of_another_size_that_comes_before_its_pull_ends_it() -> None:
    sink = Sink()
    sink.claim("pull", 3)
    sink.manager.fetch(AttemptKey("pull", 0), PeerRef(*PEER, ""), 2, 100.0, 1.0)
    assert [type(message) for message in sink.sent()][-1:] == [KVRefused]
    sink.manager.check_integrity()
