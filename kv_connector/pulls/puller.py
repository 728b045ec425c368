"""Pulls prefixes of prompts from peers that have them cached, and holds blocks for the requests meanwhile. Pure.

    WANTED ──asked──> ASKED ──Fetched──> HELD ──the request starts, ends or gives way──> OVER
       └ not worth it, nothing missing ─┴ NotFetched, given up ─────────────────────────────^

Stands before a node's own tiers in the planner's eyes (LowerTiers of engine/scheduling/ports.py): a request that waits
for a pull is outside of the batch. What was pulled is registered under this node's own hashes of the request's tokens,
and found by the request, and by others, as if it had been computed here. A request never fails because of a pull: it
computes what it does not find. docs/pulls.md tells the protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.hashing import num_public_blocks
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.tenants import tenant_of_block
from tandem.engine.contracts.wire.handoff import KVPull
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef, PrefixHint
from tandem.engine.scheduling.ports import LowerTiers, Taker
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import StepMeta
from tandem.kv_connector.protocol.outcomes import DEADLINE, Fetched, NotFetched
from tandem.kv_connector.pulls.rates import PullRates
from tandem.kv_connector.pulls.record import Pull, PullCounters, PullStage
from tandem.kv_connector.sink.manager import SinkManager


class Puller:
    """The pulls of one node. Implements LowerTiers. `below` are this node's own tiers; `compute_rate` measures prompt
    tokens, as the step clock does. The time is that of the last `on_tick`, in monotonic seconds."""

    def __init__(
        self,
        info: NodeInfo,
        pool: BlockPool,
        sink: SinkManager,
        below: LowerTiers,
        options: NodeOptions,
        compute_rate: Rate,
    ) -> None:
        self.info = info
        self.counters = PullCounters()
        self.rates = PullRates()
        self.compute_rate = compute_rate
        self._pool, self._sink, self._below = pool, sink, below
        self._cache, self._timeouts = options.cache, options.timeouts
        self._pulls: dict[Taker, Pull] = {}
        self._by_key: dict[AttemptKey, Pull] = {}
        self._moving: set[bytes] = set()
        self._connected: set[NodeKey] = set()
        self._connects: list[PeerRef] = []
        self._outbox: list[tuple[NodeKey, Message]] = []
        self._numbers = itertools.count()
        self._now = 0.0

    # --- requests -------------------------------------------------------------------------------------------

    def want(self, request: Request, hint: PrefixHint) -> None:
        """Notes that a prefix of `request` may be pulled from the peer that `hint` names. Must be called before the
        scheduler gets `request`."""
        if self._pool.enable_caching and hint.peer.node_id != self.info.node_id:
            self._pulls[request] = Pull(request, hint)

    def prepare(
        self, taker: Taker, hashes: Sequence[bytes], hits: Sequence[int], runs_alone: bool, num_taken: int = 0
    ) -> int | None:
        """See LowerTiers. What this node has below is brought up first."""
        pull = self._pulls.get(taker)
        if pull is not None and pull.stage is PullStage.ASKED:
            return None
        if len(hits) < len(hashes) and hashes[len(hits)] in self._moving:
            return None  # another request's pull brings it
        if pull is None or pull.stage is not PullStage.WANTED:
            return self._below.prepare(taker, hashes, hits, runs_alone, num_taken)
        if self._below.prepare(taker, hashes, hits, runs_alone=False) is None:
            return None
        self._ask(pull, hashes, hits)
        if pull.stage in (PullStage.WANTED, PullStage.ASKED):
            return None
        return self._below.prepare(taker, hashes, hits, False, num_taken)

    def load_with_step(self, request: Request, block_ids: Sequence[int], hashes: Sequence[bytes]) -> None:
        self._below.load_with_step(request, block_ids, hashes)

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        return self._below.step_meta(step_id, meta)

    def started(self, taker: Taker, hashes: Sequence[bytes]) -> None:
        self._forget(taker)
        self._below.started(taker, hashes)

    def ended(self, taker: Taker) -> None:
        self._forget(taker)
        self._below.ended(taker)

    def flush(self) -> None:
        self._below.flush()

    # --- what happens elsewhere -----------------------------------------------------------------------------

    def on_outcome(self, outcome: Fetched | NotFetched) -> None:
        pull = self._by_key.pop(outcome.key, None)
        blocks = outcome.block_ids if isinstance(outcome, Fetched) else ()
        if pull is None:  # given up in the moment in which it came
            self._pool.free(blocks, None)
            return
        self._moving.difference_update(pull.wanted)
        seconds, size = self._now - pull.asked_at, self._cache.block_size
        if not blocks:
            self.counters.failed += 1
            if isinstance(outcome, NotFetched) and outcome.reason == DEADLINE:
                self.rates.measured(pull.hint.peer.node_id, len(pull.wanted) * size, seconds, self._now)
            self._let_go(pull)
            return
        self.counters.came(seconds, len(blocks) * size)
        self.rates.measured(pull.hint.peer.node_id, len(blocks) * size, seconds, self._now)
        self._register(pull, blocks)
        pull.stage = PullStage.HELD

    def peer_connected(self, info: NodeInfo) -> None:
        self._connected.add(info.key)
        for pull in self._by_key.values():
            if pull.hint.peer.key == info.key:
                self._send(pull)

    def peer_lost(self, peer: NodeKey) -> None:
        """Ends the pulls from a peer that is gone or refuses this node. The sink may have reported their ends
        already."""
        self._connected.discard(peer)
        for pull in [each for each in self._by_key.values() if each.hint.peer.key == peer]:
            self.counters.failed += 1
            self._give_up(pull)

    def on_tick(self, now: float) -> None:
        """Asks again the peers that should have answered by now. The end of a pull that lasts too long comes from the
        sink."""
        self._now = now
        for pull in self._by_key.values():
            if now >= pull.resend_at and pull.hint.peer.key in self._connected and self._sink.is_unanswered(pull.key):
                self._send(pull)

    # --- out ------------------------------------------------------------------------------------------------

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def drain_connects(self) -> list[PeerRef]:
        connects, self._connects = self._connects, []
        return connects

    def fetch_rates(self) -> tuple[float, dict[str, float]]:
        """How many seconds pulling takes for each token: from any peer, and by node_id."""
        if not self._pool.enable_caching:
            return 0.0, {}
        return self.rates.s_per_token(self.compute_rate.seconds, self._now), self.rates.by_peer(self._now)

    def as_counters(self) -> dict[str, float]:
        return self.counters.as_dict()

    def check_integrity(self) -> None:
        self._below.check_integrity()
        for pull in self._pulls.values():
            is_asked = pull.stage is PullStage.ASKED
            assert is_asked == (self._by_key.get(pull.key) is pull), "a pull is asked for or over"
            assert pull.held == [] or is_asked or pull.stage is PullStage.HELD, f"a pull that is {pull.stage} holds"
            for block_id in pull.held:
                assert self._pool.ref_count(block_id) > 0, f"block {block_id} is held for a pull and free"
        moving = [block_hash for pull in self._by_key.values() for block_hash in pull.wanted]
        assert len(moving) == len(set(moving)), "a block is pulled twice"
        assert set(moving) == self._moving, "what moves is miscounted"

    # --- inside ---------------------------------------------------------------------------------------------

    def _ask(self, pull: Pull, hashes: Sequence[bytes], hits: Sequence[int]) -> None:
        """Asks the peer for the blocks, if that is worth it. Leaves the pull WANTED while others' pulls fill their
        share of the pool."""
        size, peer, first = self._cache.block_size, pull.hint.peer, len(hits)
        wanted = hashes[first : pull.hint.num_tokens // size]
        compute = self.compute_rate.seconds
        if not wanted:
            pull.stage = PullStage.OVER
        elif not self.rates.is_worth(peer.node_id, compute, self._now):
            self.counters.declined += 1
            pull.stage = PullStage.OVER
        elif not self._pool.reservations.may_wait_with(self._pool.cost(first + len(wanted))):
            pull.stage = pull.stage if self._by_key else PullStage.OVER
        elif any(block_hash in self._moving for block_hash in wanted):
            return
        else:
            self.counters.asked += 1
            pull.stage, pull.first, pull.hashes = PullStage.ASKED, first, list(hashes[: first + len(wanted)])
            pull.held = list(hits)
            self._pool.touch(hits)
            give_back = partial(self._give_up, pull)
            pull.hold = self._pool.reservations.add(
                Kind.PULL, self._pool.cost(len(pull.hashes)), give_back, pull.request
            )
            self._moving.update(wanted)
            request_id, attempt = pull.request.key
            pull.key = AttemptKey(f"{request_id}/{self.info.node_id}/{next(self._numbers)}", attempt)
            self._by_key[pull.key] = pull
            patience = max(self._timeouts.pull_s, 2 * compute * size * len(wanted))
            pull.asked_at, pull.deadline = self._now, self._now + patience
            self._sink.fetch(pull.key, peer, len(wanted), pull.deadline, self._now, first_block=first)
            if pull.hint.peer.key in self._connected:
                self._send(pull)
            else:
                self._connects.append(peer)

    def _send(self, pull: Pull) -> None:
        pull.resend_at = self._now + self._timeouts.resend_s
        message = KVPull(
            request_id=pull.key.request_id,
            attempt=pull.key.attempt,
            source_epoch=pull.hint.peer.epoch,
            sink_epoch=self.info.epoch,
            first_block=pull.first,
            block_hashes=b"".join(pull.hashes),
            deadline_s=max(0.0, pull.deadline - self._now),
        )
        self._outbox.append((pull.hint.peer.key, message))

    def _register(self, pull: Pull, blocks: Sequence[int]) -> None:
        """Registers pulled blocks in the pool's table. A block that others have put there meanwhile stays, and is held
        in place of its copy: copies held beside it would only take room from the request that they are for."""
        secrecy = pull.request.prompt.secrecy
        num_public = num_public_blocks(secrecy, self._cache.block_size, self._cache.hash_block_size)
        for index, block_id in enumerate(blocks, pull.first):
            parent = pull.hashes[index - 1] if index else None
            tenant = tenant_of_block(index, num_public, secrecy.salt)
            self._pool.register(block_id, pull.hashes[index], parent, None, tenant)
        found = self._pool.windows.usable(self._pool.match_prefix(pull.hashes))
        self._pool.touch(found)
        self._pool.free([*pull.held, *blocks], None)
        pull.held = found

    def _forget(self, taker: Taker) -> None:
        pull = self._pulls.pop(taker, None)
        if pull is not None:
            self._give_up(pull)

    def _give_up(self, pull: Pull) -> None:
        if self._by_key.pop(pull.key, None) is not None:
            self._moving.difference_update(pull.wanted)
            self._sink.cancel(pull.key, self._now)
        self._let_go(pull)

    def _let_go(self, pull: Pull) -> None:
        self._pool.free(pull.held, None)
        self._pool.reservations.end(pull.hold)
        pull.held, pull.stage = [], PullStage.OVER
