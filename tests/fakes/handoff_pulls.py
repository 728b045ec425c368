"""The model of handoff_world.py with requests that the sink begins: it pulls what the source has cached.

After kv_connector/pulls/puller.py, server.py and what kv_connector/sink/manager.py says of pulls: the question is sent
again until it is heard, what is found is pinned and offered as a computed prompt without a grant, pulls are granted
after all prompts and given up where there is no room. Whether the source still has the blocks when it is asked is left
open at each question.
"""

from __future__ import annotations

from handoff_records import SourceRecord
from handoff_setting import Setting
from handoff_world import World

from tandem.kv_connector.protocol.sink_table import SinkEvent, SinkState
from tandem.kv_connector.protocol.source_table import SourceEvent


class PullingWorld(World):
    """`setting.pulls`: the requests that are pulls."""

    def place(self, r: int) -> None:
        super().place(r)
        if r in self.setting.pulls:
            self.pending.discard(("submit_source", r))

    def cancel(self, r: int) -> None:
        super().cancel(r)
        if r in self.setting.pulls:
            self.pending.discard(("cancel_source", r))

    def submit_sink(self, r: int) -> None:
        super().submit_sink(r)
        if r in self.setting.pulls:
            self.ask(r)

    def ask(self, r: int) -> None:
        self.network.add(("pull", r, self.sink_epoch, self.placed[r][0]))

    def hear_pull(self, message: tuple, has_blocks: bool) -> None:
        """One that was answered by a claim is not heard again, even if that hand-off is forgotten."""
        _, r, sender, addressee = message
        was_heard = self.sources[r] is not None or self.source_ends[r] != ""
        if addressee != self.source_epoch or (was_heard and "answers_again" not in self.setting.flaws):
            return
        used = sum(self.prompt_blocks(o) for o, other in enumerate(self.sources) if other and other.has_blocks)
        if not has_blocks or used + self.prompt_blocks(r) > self.setting.source_blocks:
            self.network.add(("release", r, self.source_epoch, sender))
            return
        setting = self.setting
        record = SourceRecord(setting.source_machine(self.source_epoch, sender, setting.source_rows))
        record.has_blocks = record.is_computed = True
        self.sources[r], self.source_ends[r] = record, ""
        for event in (SourceEvent.CLAIM, SourceEvent.START, SourceEvent.COMPUTED):
            self.on_source(r, event)

    def settle(self, r: int) -> None:
        if r in self.setting.pulls:
            self.grant_in_order()
        else:
            super().settle(r)

    def grant_in_order(self) -> None:
        super().grant_in_order()
        for r in self.setting.pulls:
            record = self.sinks[r]
            if record is None or record.machine.state is not SinkState.QUEUED or self.queue:
                continue
            needed = self.setting.granted[r]
            if needed <= self.num_free_on_sink():
                record.contents = ("unwritten",) * needed
                self._evict()
                self.run_sink(r, record.machine.on_can_grant(100 * self.sink_epoch + r + 1))
            else:
                self.run_sink(r, record.machine.on(SinkEvent.DEADLINE))


def open_world(setting: Setting, state: tuple) -> World:
    return (PullingWorld if setting.pulls else World)(setting, state)
