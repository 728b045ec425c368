"""Who may write into this sink's blocks: sources that come, are lost and come back, and their fences. Part of
SinkManager. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.peer_effects import AdmitSource, FenceSource
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.line import SinkQueue
from tandem.kv_connector.sink.record import SinkRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys

MAX_LOST = 4096
ENDED = (S.COMMITTED, S.CLOSED, S.REJECTED)
OVER = (*ENDED, S.UNKNOWN)
# The request has ended; its blocks wait for KVDrained or a fence, however long: no passing of time makes them safe.
UNTIL_SAFE = (S.QUARANTINED,)


class SinkPeers(SinkQueue):
    """A source that is lost may still write: what it was granted stays in quarantine until it is fenced."""

    def __init__(self, info: NodeInfo, keys: ClusterKeys, pool: BlockPool, options: NodeOptions) -> None:
        super().__init__(info, keys, pool, options)
        self._lost: OrderedDict[tuple[str, int], None] = OrderedDict()  # and not greeted since
        self._fences: Counter[tuple[str, int]] = Counter()  # asked for and not ended

    def peer_connected(self, info: NodeInfo) -> None:
        """A source was greeted (again). One that was lost gets new grants at once, whether its fence has ended or not:
        what it held before stays in quarantine, and that fence says nothing of what it is granted from now on."""
        self._lost.pop((info.node_id, info.epoch), None)
        self._effects.append(AdmitSource(info))

    def peer_lost(self, node_id: str, epoch: int) -> None:
        """The source is silent or gone: what it may still write stays in quarantine until it is fenced."""
        self._lost[node_id, epoch] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        self._fences[node_id, epoch] += 1
        self._effects.append(FenceSource(node_id, epoch))
        for record in self._of_source(node_id, epoch):
            self._because(record, outcomes.SOURCE_LOST)
            self._run(record, record.machine.on_source_lost(epoch))
            self._settle(record)

    def fenced(self, node_id: str, epoch: int) -> None:
        """A fence closes grants that were open when it was asked for, so only hand-offs that have seen the loss count,
        and, of a source lost more than once, only when its last fence has ended."""
        self._fences[node_id, epoch] -= 1
        if self._fences[node_id, epoch] > 0:
            return
        del self._fences[node_id, epoch]
        for record in self._of_source(node_id, epoch):
            if record.machine.source_lost:
                self._run(record, record.machine.on_fenced(epoch))
                self._settle(record)

    # --- inside ---------------------------------------------------------------------------------------------

    def _of_source(self, node_id: str, epoch: int) -> list[SinkRecord]:
        source = (node_id, epoch)
        return [each for each in self._records.values() if (each.source_id, each.machine.source_epoch) == source]

    def _has_stayed_away(self, record: SinkRecord) -> bool:
        """A source that was lost greets again when it gets its half of a request: its ticket waits for that."""
        waited = self._now - record.expected_at
        return waited >= self._options.timeouts.connect_s and (
            (record.source_id, record.machine.source_epoch) in self._lost
        )

    @staticmethod
    def _because(record: SinkRecord, reason: str) -> None:
        """Why the hand-off ends, if it has not ended yet."""
        if record.machine.state not in (*ENDED, *UNTIL_SAFE):
            record.reason = reason

    def _settle(self, record: SinkRecord) -> None:
        """After any event: queue a new claim, note an end, grant what can be granted now."""
        line = self._pulls if record.most_blocks or record.follows else self._queue
        if record.machine.state is S.QUEUED and record not in line:
            line.append(record)
        if record.machine.state in ENDED and not record.closed_at:
            record.closed_at = self._now
        self._grant_in_order()
