"""The sink's pool and its queue of claims, counted in blocks, after kv_connector/sink/manager.py."""

from __future__ import annotations

from handoff_records import SinkRecord
from handoff_setting import Setting

from tandem.kv_connector.protocol.sink_table import SinkAction, SinkState


class SinkPool:
    """Part of World: `cached` and pins are of each request's own prefix, `held` belongs to sequences that decode."""

    setting: Setting
    sink_epoch: int
    sinks: list
    queue: list[int]
    cached: list[bool]
    held: list[int]

    def run_sink(self, r: int, actions: tuple[SinkAction, ...]) -> None:
        raise NotImplementedError

    def settle(self, r: int) -> None:
        if self.sinks[r].machine.state is SinkState.QUEUED and r not in self.queue:
            self.queue.append(r)
        self.grant_in_order()

    def grant_in_order(self) -> None:
        """SinkManager._grant_in_order, counting blocks."""
        while self.queue:
            r = self.queue[0]
            record = self.sinks[r]
            if record is None or record.machine.state is not SinkState.QUEUED:
                self.queue.remove(r)
                continue
            self._pin(r, record)
            needed = self.prompt_blocks(r) - (self.setting.hits[r] if record.pinned else 0)
            if needed > self.num_free_on_sink():
                if self._others_will_free_blocks() or "never_unpins" in self.setting.flaws:
                    return
                self._unpin_behind(r, needed)
            if needed > self.num_free_on_sink():
                return
            self.queue.remove(r)
            record.contents = ("unwritten",) * needed
            self._evict()
            self.run_sink(r, record.machine.on_can_grant(100 * self.sink_epoch + r + 1))

    def _pin(self, r: int, record: SinkRecord) -> None:
        record.pinned = record.pinned or self.cached[r]

    def _unpin_behind(self, head: int, needed: int) -> None:
        for r, record in enumerate(self.sinks):
            waits = record and record.machine.state in (SinkState.EXPECTING, SinkState.QUEUED)
            if r != head and waits and record.pinned and self.num_free_on_sink() < needed:
                record.pinned = False

    def _others_will_free_blocks(self) -> bool:
        return any(self.held) or any(record and record.contents for record in self.sinks)

    def _evict(self) -> None:
        """Cached prefixes that nobody pins go when their room is needed."""
        for r, record in enumerate(self.sinks):
            pinned = record and record.pinned
            unpinned = sum(h for h, c in zip(self.setting.hits, self.cached, strict=True) if c)
            if self.cached[r] and not pinned and self.num_used_on_sink(with_pins=False) + unpinned > self.capacity():
                self.cached[r] = False

    def capacity(self) -> int:
        return self.setting.sink_blocks

    def prompt_blocks(self, r: int) -> int:
        return self.setting.granted[r] + self.setting.hits[r]

    def num_used_on_sink(self, with_pins: bool = True) -> int:
        granted = sum(len(record.contents) for record in self.sinks if record)
        pins = [h for h, record in zip(self.setting.hits, self.sinks, strict=True) if record and record.pinned]
        return sum(self.held) + granted + (sum(pins) if with_pins else 0)

    def num_free_on_sink(self) -> int:
        return self.capacity() - self.num_used_on_sink()
