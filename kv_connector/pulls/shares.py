"""The prompts that this node computes together with others: who is asked, which chunk comes, which leaves. Pure.

Each chunk goes from the node that computes it to each that needs it by a hand-off of its own, a pull to its sink, into
blocks that the sink's request has already. docs/pipelined_prompts.md tells the protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.wire.handoff import KVLayers
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef, SharedWork
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.step import StepMeta
from tandem.kv_connector.protocol.jobs import ArrivingKV, BlockPush, StepMoves
from tandem.kv_connector.protocol.outcomes import (
    Fetched,
    HandoffCompleted,
    HandoffFailed,
    NotFetched,
    SinkOutcome,
    SourceOutcome,
)
from tandem.kv_connector.pulls.chunks import LEAST_TOKENS, MOST_TOKENS, ChunkTable, divide
from tandem.kv_connector.pulls.invitations import Invitations
from tandem.kv_connector.pulls.share import Coming, Leaving, Share, ShareCounters
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.source.manager import SourceManager

# How long a prompt may take its nodes at least, from the question on, and how often what it would take by the rate of
# short ones. What is lost is noticed otherwise; a prompt that nobody gets done in time has its turns when nodes have
# nothing else to do. With 10 s and four times two of seven began anew; docs/measurements.md#a-trace-on-two-gpus.
LEAST_PATIENCE_S, PATIENCE = 60.0, 20.0


class SharedPrompts:
    """Implements PromptShares of engine/scheduling/ports.py. `compute_rate` measures prompt tokens, as the step clock
    does. The time is that of the last `on_tick`, in monotonic seconds."""

    def __init__(
        self,
        info: NodeInfo,
        pool: BlockPool,
        sink: SinkManager,
        source: SourceManager,
        options: NodeOptions,
        compute_rate: Rate,
    ) -> None:
        self.info, self.counters, self.compute_rate = info, ShareCounters(), compute_rate
        self._pool, self._sink, self._source = pool, sink, source
        self._block_size = options.cache.block_size
        most = options.scheduler.max_num_batched_tokens
        self._most_tokens = min(MOST_TOKENS, most, options.scheduler.max_prefill_chunk or most)
        self._wanted: dict[Request, tuple[PeerRef, ...]] = {}
        self._shares: dict[str, Share] = {}
        self._by_request: dict[Request, Share] = {}
        self._by_key: dict[AttemptKey, Share] = {}
        self._disproved: list[Request] = []
        self._invitations = Invitations(info.epoch, options.timeouts.resend_s, sink.is_unanswered)
        self._numbers = itertools.count()
        self._now = 0.0

    # --- requests -------------------------------------------------------------------------------------------

    def want(self, request: Request, helpers: Sequence[PeerRef]) -> None:
        """Notes that `helpers` may compute chunks of `request`. Must be called before the scheduler gets it. With a
        prompt whose samples part here nobody helps."""
        if _parts_here(request):
            return
        if helpers and self.info.node_id not in [each.node_id for each in helpers]:
            request.get_help(1 + len(helpers))
            self._wanted[request] = tuple(helpers)

    def join(self, work: SharedWork, request: Request, attempt: int, deadline: float) -> None:
        """Begins a helper's share. `request` has all its blocks, which anybody may write."""
        table, size = ChunkTable(work.ends, len(work.nodes)), self._block_size
        blocks = tuple(request.block_ids)
        share = Share(work.name, attempt, work.place, table, work.nodes, request, blocks, size, deadline, 0)
        self._open(share)
        self._agree(share)

    def knows(self, name: str) -> bool:
        return name in self._shares

    # --- the scheduler --------------------------------------------------------------------------------------

    def next_part(self, request: Request, room: int) -> tuple[int, int] | None:
        """See PromptShares."""
        share = self._by_request.get(request)
        if share is None:
            share = self._ask(request, self._wanted.pop(request, ()), room)
        if share is None:
            request.go_alone()
            return request.num_computed_tokens, request.num_launched_tokens
        return share.next_part()

    def step_meta(self, step_id: int, meta: StepMeta | None) -> StepMeta | None:
        """The step's connector metadata, with what it pushes of chunks and what it has to wait for."""
        pushes: list[BlockPush] = []
        arriving: list[ArrivingKV] = []
        rows = [share for share in self._by_request.values() if share.request.last_step == step_id]
        rows = [share for share in rows if share.position < share.end]
        for share in rows:
            index = share.table.next_of(share.place, share.position)
            arriving += self._await(share, index)
            share.position = share.request.num_computed_tokens
            share.last_steps[index] = step_id
            pushes += self._push(share, index)
        if not rows:
            return meta
        moves = StepMoves(step_id) if meta is None else meta
        assert isinstance(moves, StepMoves)
        # What was complete before is pushed behind the step: it may be what comes.
        whole = tuple(replace(push, step_id=step_id) for push in moves.whole) if arriving else moves.whole
        return StepMoves(step_id, (*moves.pushes, *pushes), whole, moves.loads, (*moves.arriving, *arriving))

    def ended(self, request: Request) -> None:
        """See PromptShares."""
        self._wanted.pop(request, None)
        share = self._by_request.pop(request, None)
        if share is None:
            return
        share.is_gone = True
        if share.position >= share.end and share.has_come:
            self._advance(share)
        else:
            self._close(share)

    # --- what happens elsewhere -----------------------------------------------------------------------------

    def on_layers(self, sender: NodeKey, message: KVLayers) -> None:
        """Hears that layers of a chunk have come."""
        share, grant = self._by_key.get(message.key), self._sink.grant_of(message.key)
        if share is None or grant is None or grant.signature != message.grant_signature or grant.source != sender:
            return
        for each in share.coming.values():
            each.has_begun |= each.key == message.key

    def on_claim(self, key: AttemptKey) -> None:
        """Hears that a hand-off has been claimed."""
        share = self._by_key.get(key)
        if share is not None and self._sink.has_claimed(key):
            share.unclaimed.discard(key)
            if not share.unclaimed and not share.is_engaged:
                self._engage(share)

    def on_outcome(self, outcome: SinkOutcome | SourceOutcome) -> bool:
        """Takes the end of a hand-off; False if that was no chunk's."""
        if not isinstance(outcome, Fetched | NotFetched | HandoffCompleted | HandoffFailed):
            return False
        share = self._by_key.pop(outcome.key, None)
        if share is None:
            return False
        if isinstance(outcome, Fetched):
            self._arrived(share, outcome)
        elif isinstance(outcome, HandoffCompleted):
            del share.leaving[outcome.key]
            self._advance(share)
        else:
            self._fail(share)
        return True

    def peer_connected(self, info: NodeInfo) -> None:
        self._invitations.peer_connected(info, self._shares.values(), self._now)

    def peer_lost(self, peer: NodeKey) -> None:
        """Forgets invitations to a peer that is gone. The hand-offs from it and to it end by themselves."""
        self._invitations.peer_lost(peer)

    def on_tick(self, now: float) -> None:
        self._now = now
        for share in list(self._shares.values()):
            self._invitations.repeat(share, now)
            self._advance(share)

    # --- out ------------------------------------------------------------------------------------------------

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        return self._invitations.drain_outbox()

    def drain_connects(self) -> list[PeerRef]:
        return self._invitations.drain_connects()

    def drain_disproved(self) -> list[Request]:
        """The requests that must fail, since what they have computed is behind KV that did not come, or came wrong."""
        disproved, self._disproved = self._disproved, []
        return disproved

    def as_counters(self) -> dict[str, float]:
        return {f"shared_{name}": float(value) for name, value in vars(self.counters).items()}

    @property
    def is_idle(self) -> bool:
        return not self._shares

    def check_integrity(self) -> None:
        for share in self._shares.values():
            assert share.is_gone or self._by_request[share.request] is share, "a share is its request's"
            assert share.is_gone or tuple(share.request.block_ids[: len(share.block_ids)]) == share.block_ids
            for coming in share.coming.values():
                assert coming.is_verified or self._by_key[coming.key] is share, "a chunk comes, and nobody waits"
            assert all(self._by_key[key] is share for key in share.leaving), "a chunk leaves, and nobody knows"
        assert all(self._shares.get(share.name) is share for share in self._by_key.values()), "a share is forgotten"

    # --- inside: beginning ----------------------------------------------------------------------------------

    def _ask(self, request: Request, helpers: tuple[PeerRef, ...], room: int) -> Share | None:
        """Divides a prompt that is about to start, by what streams leave in a step, and asks its helpers. None: it
        can't be divided."""
        first, end, size = request.num_computed_tokens, request.num_launched_tokens, self._block_size
        most = min(self._most_tokens, max(room, LEAST_TOKENS))
        table = divide(first, end, len(helpers) + 1, most, size) if helpers else None
        if table is None:
            return None
        request_id, attempt = request.key
        name = f"{request_id}/{self.info.node_id}/{next(self._numbers)}"
        deadline = self._now + max(LEAST_PATIENCE_S, PATIENCE * self.compute_rate.seconds * (end - first))
        nodes = (PeerRef(self.info.node_id, self.info.epoch, self.info.control_address), *helpers)
        share = Share(name, attempt, 0, table, nodes, request, tuple(request.block_ids), size, deadline, first)
        self._open(share)
        self._invitations.ask(share, self._now)
        return share

    def _open(self, share: Share) -> None:
        """Expects the chunks that come. The node that has the prompt grants nothing until all helpers have agreed."""
        self._shares[share.name] = self._by_request[share.request] = share
        for index in share.table.needed_at(share.place):
            key, peer = share.key(index, share.place), share.nodes[share.table.place_of(index)]
            share.coming[index], self._by_key[key] = Coming(key), share
            share.unclaimed.add(key)
            blocks, first = share.blocks_of(index), share.table.begin(index) // self._block_size
            self._sink.fetch(key, peer, len(blocks), share.deadline, self._now, blocks, share.place == 0, first)
        self._invitations.reach(peer for place, peer in enumerate(share.nodes) if place != share.place)

    def _engage(self, share: Share) -> None:
        """Grants blocks, and claims others', when all helpers have claimed: that is their word that they help."""
        self.counters.begun += 1
        for each in share.coming.values():
            self._sink.let_in(each.key, self._now)
        self._agree(share)

    def _agree(self, share: Share) -> None:
        """Begins the hand-offs of this node's own chunks, of which the first may be under way."""
        share.is_engaged = True
        for index in share.table.of(share.place):
            for place in share.table.needed_by(index):
                key = share.key(index, place)
                share.leaving[key], self._by_key[key] = Leaving(index), share
                blocks = share.blocks_of(index)
                self._source.chunks.expect(key, share.nodes[place], blocks, share.deadline, self._now)
            if index in share.last_steps:
                self._push(share, index)

    # --- inside: steps --------------------------------------------------------------------------------------

    def _await(self, share: Share, index: int) -> list[ArrivingKV]:
        """What a step that computes chunk `index` has to wait for."""
        arriving = []
        for each in share.needs(index):
            each.is_read = True
            grant = None if each.is_verified else self._sink.grant_of(each.key)
            if not each.is_verified:
                grant_id = 0 if grant is None else grant.grant_id  # 0: it has ended, and so the step is spoiled
                arriving.append(ArrivingKV(grant_id, share.request.slot, share.deadline))
        self._settle(share)
        return arriving

    def _push(self, share: Share, index: int) -> list[BlockPush]:
        """Tells the hand-offs of chunk `index` how far it is, and returns what they push with the newest step."""
        num_tokens = min(share.position, share.table.ends[index]) - share.table.begin(index)
        keys = [key for key, leaving in share.leaving.items() if leaving.index == index]
        return [
            push for key in keys for push in self._source.chunks.step_built(key, share.last_steps[index], num_tokens)
        ]

    def _settle(self, share: Share) -> None:
        """Lets tokens be told, and blocks be found, once what they stand behind is verified."""
        if share.request.is_doubtful and share.is_sound:
            share.request.trust()

    # --- inside: progress and ends --------------------------------------------------------------------------

    def _arrived(self, share: Share, outcome: Fetched) -> None:
        self._pool.free(outcome.block_ids, None)  # the request has them, too
        self.counters.tokens += len(outcome.block_ids) * self._block_size
        for each in share.coming.values():
            if each.key == outcome.key:
                each.has_begun = each.is_verified = True
        self._settle(share)
        self._advance(share)

    def _advance(self, share: Share) -> None:
        """Hands over chunks that are computed, behind nothing that is not verified; ends a share that is over."""
        for key, leaving in list(share.leaving.items()):
            is_computed = share.position >= share.table.ends[leaving.index]
            has_run = is_computed and self._pool.has_completed(share.last_steps[leaving.index])
            if has_run and not leaving.is_told and all(each.is_verified for each in share.needs(leaving.index)):
                leaving.is_told = True
                self._source.chunks.computed(key, self._now)
        if share.is_engaged and not share.leaving and share.has_come and share.position >= share.end:
            self._close(share)

    def _fail(self, share: Share) -> None:
        """Ends a share of which something will not come, or not go. The node that has the prompt computes it alone,
        unless a helper may be writing into its blocks."""
        is_sound = share.has_come or not share.is_engaged
        self._close(share)
        if share.is_gone:
            return
        if share.place == 0 and is_sound:
            self.counters.declined += 1
        else:
            self.counters.failed += share.place == 0
            self._disproved.append(share.request)

    def _close(self, share: Share) -> None:
        """Forgets a share, and gives up whatever of it has not ended."""
        del self._shares[share.name]
        self._by_request.pop(share.request, None)
        share.request.go_alone(share.num_verified_tokens)
        for each in share.coming.values():
            if self._by_key.pop(each.key, None) is not None:
                self._sink.cancel(each.key, self._now)
        for key in share.leaving:
            if self._by_key.pop(key, None) is not None:
                self._source.cancel(key, self._now)


def _parts_here(request: Request) -> bool:
    """Whether samples of a prompt go on in sequences of their own as soon as it is computed. What these stand behind
    could not be withheld until it is verified, as can what is drawn for the prompt itself."""
    prompt = request.prompt
    return len(request.sample_indices) > 1 and prompt.mode != "prefill" and not prompt.sampling.beam_width
