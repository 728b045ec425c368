"""Chunks of prompts that several nodes compute: pushed, layer by layer, while they are computed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.kv_connector.protocol.jobs import BlockPush
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.source_table import SourceEvent as E
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.actions import SourceActions
from tandem.kv_connector.source.ledger import SourceLedger
from tandem.kv_connector.source.peers import SourcePeers


class PushedChunks:
    """The chunks of one source. A hand-off has references of its own to the blocks that are complete; it counts from
    the chunk's first token."""

    def __init__(self, ledger: SourceLedger, actions: SourceActions, peers: SourcePeers) -> None:
        self._ledger, self._actions, self._peers = ledger, actions, peers

    def expect(self, key: AttemptKey, peer: PeerRef, block_ids: Sequence[int], deadline: float, now: float) -> None:
        """Announces a chunk in these blocks, which are not computed yet, to `peer`, which expects it, and is told of
        each layer. It claims as soon as `peer` is connected. What was cached of it may have lost window blocks, all
        before what is read behind it: there none are sent."""
        self._ledger.at(now)
        size, is_whole = self._ledger.block_size, self._ledger.pool.windows.is_whole
        record = self._ledger.add(key, HandoffKind.CHUNK, peer, len(block_ids) * size, deadline)
        record.first_kept = size * max((i + 1 for i, each in enumerate(block_ids) if not is_whole(each)), default=0)
        record.is_awaited = True
        record.coming_block_ids = list(block_ids)
        self._peers.open_channel(peer)
        if self._peers.knows(peer):
            self._peers.claim_offer(record)

    def step_built(self, key: AttemptKey, step_id: int, num_tokens: int) -> list[BlockPush]:
        """Notes that the first `num_tokens` tokens are computed when step `step_id` has run. Returns what is to be
        pushed with that step."""
        record = self._ledger.records[key]
        record.step_built(step_id, num_tokens)
        self._ledger.hold(record, record.coming_block_ids[: num_tokens // self._ledger.block_size])
        return record.take_layer_pushes() if record.machine.state is S.PUSHING else []

    def computed(self, key: AttemptKey, now: float) -> None:
        """Hands over a chunk that is computed, behind nothing that could still be wrong."""
        self._ledger.at(now)
        record = self._ledger.records[key]
        self._actions.run(record, record.machine.on(E.COMPUTED))
