"""Whom a source hands KV to: hand-offs by peer, and the channels that they need. Part of SourceManager. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.parts import Continuation, FirstToken, NodeInfo, PeerRef
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.jobs import Flush, HandoffKey
from tandem.kv_connector.protocol.peer_effects import CloseChannel, OpenChannel
from tandem.kv_connector.protocol.source_table import SourceEvent as E
from tandem.kv_connector.protocol.source_table import SourceMachine
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.actions import SourceActionRunner
from tandem.kv_connector.source.record import NO_STEP, SourceRecord

OVER = (S.DRAINED, S.CLOSED)
CLAIMED = (S.CLAIMING, S.PARKED, S.PARKED_DONE)  # and not granted


class SourcePeers(SourceActionRunner):
    """A node greets others for many reasons; a channel is opened to those that get KV."""

    def __init__(self, info: NodeInfo, pool: BlockPool, options: NodeOptions) -> None:
        super().__init__(info, pool, options)
        self._block_size = options.cache.block_size
        self._records: dict[HandoffKey, SourceRecord] = {}
        self._peers: dict[tuple[str, int], NodeInfo] = {}
        self._open: set[tuple[str, int]] = set()  # a channel was asked for and is not known to be broken

    def offer(
        self,
        key: HandoffKey,
        peer: PeerRef,
        block_ids: Sequence[int],
        num_tokens: int,
        deadline: float,
        now: float,
        first_tokens: Sequence[FirstToken] = (),
        last_step: int = NO_STEP,
    ) -> None:
        """Hands the KV of `num_tokens` tokens to `peer`, which expects it: they are in `block_ids`, in order of
        position, complete once step `last_step` (NO_STEP: none) has run. One reference to each block passes to the
        hand-off. It claims as soon as `peer` is connected and ends like any other."""
        self._now = now
        assert len(block_ids) == -(-num_tokens // self._block_size), "the blocks of just these tokens"
        record = self._add(key, peer, num_tokens, deadline)
        record.block_ids, record.owns_blocks = list(block_ids), True
        record.num_computed_tokens, record.last_step = num_tokens, last_step
        record.first_tokens = tuple(first_tokens)
        if (peer.node_id, peer.epoch) in self._peers:
            self._claim_offer(record)

    # --- running sequences ----------------------------------------------------------------------------------

    def follow(self, key: HandoffKey, peer: PeerRef, most_tokens: int, deadline: float, now: float) -> None:
        """Claims room at `peer`, which expects it, for a sequence that runs on meanwhile and has at most `most_tokens`
        tokens of KV when it is handed over. While `is_pushing`, `push_settled` and at last `hand_over` say what there
        is. It ends like any other hand-off."""
        self._now = now
        record = self._add(key, peer, most_tokens, deadline)
        record.follows = True
        if (peer.node_id, peer.epoch) in self._peers:
            self._claim_offer(record)

    def push_settled(self, key: HandoffKey, block_ids: Sequence[int], num_tokens: int, now: float) -> int:
        """Full blocks of the first `num_tokens` tokens, which are written and stay as they are, are pushed unless they
        were; `block_ids` are the sequence's, from its first token on. How many were left of the sink's size."""
        self._now = now
        record = self._records[key]
        num_full = num_tokens // self._block_size
        self._hold(record, block_ids[:num_full])
        record.num_computed_tokens = num_full * self._block_size
        push = record.take_whole_push(record.num_computed_tokens, NO_STEP)
        if push is None:
            return 0
        assert record.grant is not None
        self._jobs += [push, Flush(key, record.grant)]
        record.is_flushed = False
        return len(push.num_valid)

    def hand_over(self, key: HandoffKey, block_ids: Sequence[int], continuation: Continuation, now: float) -> None:
        """The sequence stands still: what is left of it, and how it goes on."""
        self._now = now
        record = self._records[key]
        num_tokens = continuation.num_tokens
        self._hold(record, block_ids[: -(-num_tokens // self._block_size)])
        record.num_prompt_tokens = record.num_computed_tokens = num_tokens
        record.continuation = continuation
        self._run(record, record.machine.on(E.COMPUTED))

    def is_pushing(self, key: HandoffKey) -> bool:
        """Granted, and not handed over or ended."""
        return key in self._records and self._records[key].machine.state is S.PUSHING

    def is_flushed(self, key: HandoffKey) -> bool:
        """Whether what was pushed so far has arrived."""
        return key in self._records and self._records[key].is_flushed

    def holds_blocks(self, key: HandoffKey) -> bool:
        """Whether a transfer may read blocks of the hand-off."""
        return key in self._records and self._records[key].owns_blocks

    def _hold(self, record: SourceRecord, block_ids: Sequence[int]) -> None:
        """A reference to each, besides the scheduler's."""
        num_held = len(record.block_ids)
        assert list(block_ids[:num_held]) == record.block_ids, "a running sequence's blocks stay where they are"
        self._pool.touch(block_ids[num_held:])
        record.block_ids, record.owns_blocks = list(block_ids), True

    # --- peers ----------------------------------------------------------------------------------------------

    def peer(self, node_id: str, epoch: int) -> NodeInfo | None:
        """As it was greeted."""
        return self._peers.get((node_id, epoch))

    def knows(self, key: HandoffKey) -> bool:
        """Whether there is, or a short while ago was, such a hand-off."""
        return key in self._records

    def _add(self, key: HandoffKey, peer: PeerRef, num_tokens: int, deadline: float) -> SourceRecord:
        assert key not in self._records, "each hand-off is begun once"
        record = self._records[key] = SourceRecord(
            key=key,
            peer=peer,
            num_prompt_tokens=num_tokens,
            num_blocks=-(-num_tokens // self._block_size),
            block_sizes=BlockSizes(self._block_size, self._block_size),
            deadline=deadline,
            machine=SourceMachine(self.info.epoch, peer.epoch),
        )
        self._open_channel(peer)
        return record

    def _claim_offer(self, record: SourceRecord) -> None:
        """As of a prompt that was computed, or is being computed, without waiting for its grant."""
        self._note_block_sizes(record)
        for event in (E.CLAIM, E.START) if record.follows else (E.CLAIM, E.START, E.COMPUTED):
            self._run(record, record.machine.on(event))

    def _note_block_sizes(self, record: SourceRecord) -> None:
        layout = self._peers[record.peer.node_id, record.peer.epoch].layout
        record.block_sizes = BlockSizes(self._block_size, layout.block_size if layout else self._block_size)

    def peer_connected(self, info: NodeInfo) -> None:
        """A node was greeted (again): a channel to it is opened as soon as there is something to hand over."""
        where = (info.node_id, info.epoch)
        if where in self._peers:
            return
        self._peers[where] = info
        for record in [each for each in self._records.values() if (each.peer.node_id, each.peer.epoch) == where]:
            if record.machine.state not in OVER:
                self._open_channel(record.peer)
            if record.machine.state is S.IDLE and (record.owns_blocks or record.follows):
                self._claim_offer(record)
            elif record.machine.state in CLAIMED:  # one that has greeted again after it forgot this node
                self._run(record, record.machine.on(E.TIMER))

    def peer_lost(self, node_id: str, epoch: int, reason: str = outcomes.SINK_LOST) -> None:
        """A sink is gone, or the two nodes refuse each other; `reason` is told to the router."""
        for record in self._forget(node_id, epoch):
            record.reason = reason
            self._run(record, record.machine.on_sink_lost(epoch))

    def peer_forgot(self, node_id: str, epoch: int, now: float) -> list[PeerRef]:
        """A living sink took this node for lost. What it has granted is void there. What it has not granted goes on
        when it is greeted again: it may never have heard of it, and refuses what it had. Whom to greet, if anybody."""
        self._now = now
        again = []
        for record in self._forget(node_id, epoch):
            if record.machine.state is S.IDLE or record.machine.state in CLAIMED:
                again.append(record.peer)
            else:
                record.reason = outcomes.SINK_LOST
                self._run(record, record.machine.on_sink_lost(epoch))
        return again[:1]

    def _forget(self, node_id: str, epoch: int) -> list[SourceRecord]:
        """The records of this sink, whose channel is closed."""
        self._peers.pop((node_id, epoch), None)
        if (node_id, epoch) in self._open:
            self._open.remove((node_id, epoch))
            self._effects.append(CloseChannel(node_id, epoch))
        return [each for each in self._records.values() if (each.peer.node_id, each.peer.epoch) == (node_id, epoch)]

    def _open_channel(self, peer: PeerRef) -> None:
        """Unless there is one, or nobody to open it to yet."""
        where = (peer.node_id, peer.epoch)
        if where in self._peers and where not in self._open:
            self._open.add(where)
            self._effects.append(OpenChannel(self._peers[where]))
