"""Whom a source hands KV to: hand-offs by peer, and the channels that they need. Part of SourceManager. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import NodeOptions
from tandem.engine.messages import FirstToken, NodeInfo, PeerRef
from tandem.kv_connector import outcomes
from tandem.kv_connector.handoff.source import SourceEvent as E
from tandem.kv_connector.handoff.source import SourceMachine
from tandem.kv_connector.handoff.source import SourceState as S
from tandem.kv_connector.meta import HandoffKey
from tandem.kv_connector.peer_effects import CloseChannel, OpenChannel
from tandem.kv_connector.plan import BlockSizes
from tandem.kv_connector.source_actions import SourceActionRunner
from tandem.kv_connector.source_record import NO_STEP, SourceRecord

OVER = (S.DRAINED, S.CLOSED)


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
        """As of a prompt that was computed without waiting for its grant."""
        self._note_block_sizes(record)
        for event in (E.CLAIM, E.START, E.COMPUTED):
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
            if record.machine.state is S.IDLE and record.owns_blocks:
                self._claim_offer(record)

    def peer_lost(self, node_id: str, epoch: int, reason: str = outcomes.SINK_LOST) -> None:
        """A sink is gone, or the two nodes refuse each other; `reason` is told to the router."""
        self._peers.pop((node_id, epoch), None)
        if (node_id, epoch) in self._open:
            self._open.remove((node_id, epoch))
            self._effects.append(CloseChannel(node_id, epoch))
        for record in list(self._records.values()):
            if (record.peer.node_id, record.peer.epoch) == (node_id, epoch):
                record.reason = reason
                self._run(record, record.machine.on_sink_lost(epoch))

    def _open_channel(self, peer: PeerRef) -> None:
        """Unless there is one, or nobody to open it to yet."""
        where = (peer.node_id, peer.epoch)
        if where in self._peers and where not in self._open:
            self._open.add(where)
            self._effects.append(OpenChannel(self._peers[where]))
