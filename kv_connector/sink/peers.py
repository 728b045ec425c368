"""The sources that may write into this sink's blocks: they come, are lost and come back, and are fenced. Pure."""

from __future__ import annotations

from collections import Counter, OrderedDict

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.effects import SinkEffect
from tandem.kv_connector.protocol.peer_effects import AdmitSource, FenceSource
from tandem.kv_connector.sink.actions import SinkActions
from tandem.kv_connector.sink.ledger import SinkLedger
from tandem.kv_connector.sink.line import SinkLine
from tandem.kv_connector.sink.record import SinkRecord

MAX_LOST = 4096  # a guess


class SinkPeers:
    """Keeps track of lost sources. One may still write, so what it was granted stays in quarantine until it is
    fenced."""

    def __init__(
        self, ledger: SinkLedger, actions: SinkActions, line: SinkLine, effects: list[SinkEffect], options: NodeOptions
    ) -> None:
        self._ledger, self._actions, self._line, self._effects = ledger, actions, line, effects
        self._connect_s = options.timeouts.connect_s
        self._lost: OrderedDict[NodeKey, None] = OrderedDict()  # sources that were not greeted since
        self._fences: Counter[NodeKey] = Counter()  # fences asked for that have not ended

    def connected(self, info: NodeInfo) -> None:
        """Notes that a source was greeted (again). One that was lost gets new grants at once, whether its fence has
        ended or not: what it held before stays in quarantine, and that fence does not cover what it is granted from now
        on."""
        self._lost.pop(info.key, None)
        self._effects.append(AdmitSource(info))

    def lost(self, source: NodeKey) -> None:
        """Notes that a source is silent or gone: blocks that it may still write stay in quarantine until it is
        fenced."""
        self._lost[source] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        self._fences[source] += 1
        self._effects.append(FenceSource(source))
        for record in self._ledger.of_source(source):
            record.because(outcomes.SOURCE_LOST)
            self._actions.run(record, record.machine.on_source_lost(source.epoch))
            self._line.settle(record)

    def fenced(self, source: NodeKey) -> None:
        """Notes the end of a fence. A fence closes the grants that were open when it was asked for, so it settles only
        hand-offs that have seen the loss; if the source was lost more than once, only its last fence settles them."""
        self._fences[source] -= 1
        if self._fences[source] > 0:
            return
        del self._fences[source]
        for record in self._ledger.of_source(source):
            if record.machine.source_lost:
                self._actions.run(record, record.machine.on_fenced(source.epoch))
                self._line.settle(record)

    def is_lost(self, source: NodeKey) -> bool:
        return source in self._lost

    def has_stayed_away(self, record: SinkRecord) -> bool:
        """A source that was lost greets again when it gets its half of a request: its ticket waits for that."""
        waited = self._ledger.now - record.expected_at
        return waited >= self._connect_s and self.is_lost(record.source)
