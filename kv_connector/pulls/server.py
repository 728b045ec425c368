"""The answering end of pulls: finds the blocks that a peer asks for in the pool or below, pins and offers them. Pure.

Only blocks that are cached and complete at that moment are offered, and each keeps a reference until the hand-off has
ended (`SourceManager.offer`): a block can't be evicted while a peer reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Hold, Kind
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.hashing import HASH_BYTES
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVPull
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef
from tandem.engine.scheduling.ports import LowerTiers
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import SourceOutcome
from tandem.kv_connector.pulls.answers import layout_problem, refusal
from tandem.kv_connector.source.manager import SourceManager

MAX_ANSWERED = 65536  # a guess


@dataclass(eq=False, slots=True)
class PullRequest:
    """A peer's question that waits for this node's own tiers. Toward them it is a taker: they load blocks for it."""

    sender: NodeKey
    pull: KVPull
    hashes: list[bytes]
    deadline: float

    @property
    def key(self) -> AttemptKey:
        return self.pull.key


class PullServer:
    """Answers the pulls of peers from `pool` and from `tiers`, this node's own below it."""

    def __init__(
        self, info: NodeInfo, pool: BlockPool, source: SourceManager, tiers: LowerTiers, options: NodeOptions
    ) -> None:
        self.info = info
        self.num_served_blocks = 0
        self._pool, self._source, self._tiers = pool, source, tiers
        self._block_size = options.cache.block_size
        self._offers: dict[AttemptKey, Hold] = {}
        self._waiting: dict[AttemptKey, PullRequest] = {}
        self._answered: OrderedDict[AttemptKey, None] = OrderedDict()
        self._outbox: list[tuple[NodeKey, Message]] = []

    def on_pull(self, sender: NodeKey, pull: KVPull, now: float) -> None:
        """Takes a peer's question; idempotent. One that was answered by a claim is not answered again: its hand-off may
        have said that it writes no more, and a second one under its name would take the first one's grant."""
        if pull.source_epoch != self.info.epoch or pull.key in self._answered or pull.key in self._waiting:
            return
        problem = self._problem(sender, pull)
        if problem:
            self._refuse(sender, pull, problem)
            return
        raw = pull.block_hashes
        hashes = [raw[i : i + HASH_BYTES] for i in range(0, len(raw), HASH_BYTES)]
        question = PullRequest(sender, pull, hashes, now + pull.deadline_s)
        self._waiting[pull.key] = question
        self._look(question, now)

    def on_tick(self, now: float) -> None:
        for question in list(self._waiting.values()):
            self._look(question, now)

    def on_outcome(self, outcome: SourceOutcome) -> bool:
        """Takes the end of a hand-off; False if that was no pull's."""
        offer = self._offers.pop(outcome.key, None)
        self._pool.reservations.end(offer)
        return offer is not None

    def peer_lost(self, peer: NodeKey) -> None:
        for question in [each for each in self._waiting.values() if each.sender == peer]:
            self._forget(question)

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    # --- inside ---------------------------------------------------------------------------------------------

    def _problem(self, sender: NodeKey, pull: KVPull) -> str:
        """The reason why the pull can't be served; "" when it can."""
        if self._source.knows(pull.key):
            return outcomes.UNKNOWN  # another hand-off has the same key
        peer = self._source.peers.get(sender)
        if problem := layout_problem(self.info.layout, None if peer is None else peer.layout):
            return problem
        num_hashes, rest = divmod(len(pull.block_hashes), HASH_BYTES)
        return "" if not rest and 0 <= pull.first_block < num_hashes else outcomes.UNKNOWN

    def _look(self, question: PullRequest, now: float) -> None:
        """Offers the blocks that are there, once nothing more is being loaded or half of the peer's patience is
        over."""
        hits = self._pool.match_prefix(question.hashes)
        patience_s = question.deadline - now
        hurries = patience_s < question.pull.deadline_s / 2
        if not hurries and self._tiers.prepare(question, question.hashes, hits, runs_alone=False) is None:
            return
        if patience_s > 0:
            self._answer(question, self._pool.windows.usable(self._pool.match_prefix(question.hashes)), now)
        self._forget(question)

    def _answer(self, question: PullRequest, found: Sequence[int], now: float) -> None:
        first = question.pull.first_block
        complete = []
        for block_id, block_hash in zip(found[first:], question.hashes[first:], strict=False):
            if not self._pool.is_published(block_hash):
                break
            complete.append(block_id)
        spare = self._pool.reservations.num_spare(question)
        num = min(len(complete), self._pool.windows.most(max(0, spare)))  # the rest is not offered
        blocks = self._pool.windows.usable([*found[:first], *complete[:num]])[first:]
        if not blocks:
            self._refuse(question.sender, question.pull, outcomes.BUSY if complete else outcomes.NOT_CACHED)
            return
        self._pool.touch(blocks)
        self._tiers.started(question, question.hashes[: first + len(blocks)])
        self._note_answered(question.key)
        withdraw = partial(self._withdraw, question.key)
        self._offers[question.key] = self._pool.reservations.add(
            Kind.OFFER, self._pool.cost(len(blocks)), withdraw, question.key
        )
        self.num_served_blocks += len(blocks)
        num_tokens = len(blocks) * self._block_size
        self._source.offer(question.key, PeerRef(*question.sender, ""), blocks, num_tokens, question.deadline, now)

    def _withdraw(self, key: AttemptKey) -> None:
        """Withdraws an offer that has not been granted. A granted one ends by itself, sooner than its writes could be
        taken back."""
        if self._source.withdraw(key):
            self._pool.reservations.end(self._offers.pop(key))

    def _note_answered(self, key: AttemptKey) -> None:
        self._answered[key] = None
        if len(self._answered) > MAX_ANSWERED:
            self._answered.popitem(last=False)

    def _refuse(self, sender: NodeKey, pull: KVPull, reason: str) -> None:
        self._outbox.append((sender, refusal(pull, self.info.epoch, reason)))

    def _forget(self, question: PullRequest) -> None:
        del self._waiting[question.key]
        self._tiers.ended(question)
