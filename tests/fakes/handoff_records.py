"""What the model keeps of one hand-off on each side: the real machine and what its manager knows besides."""

from __future__ import annotations

from typing import Any

from tandem.kv_connector.protocol.sink_table import SinkMachine, SinkState
from tandem.kv_connector.protocol.source_table import SourceMachine, SourceState

SOURCE_OVER = (SourceState.DRAINED, SourceState.CLOSED)
SINK_OVER = (SinkState.COMMITTED, SinkState.CLOSED, SinkState.REJECTED, SinkState.UNKNOWN)
# Values instead of members: hashing a member of an enum is a call in Python.
_SOURCE_STATES = {state._value_: state for state in SourceState}
_SINK_STATES = {state._value_: state for state in SinkState}


class SourceRecord:
    __slots__ = (
        "failed", "has_blocks", "is_computed", "jobs", "machine", "num_granted", "num_pushed", "refused",
        "resend_indices", "was_asked",
    )  # fmt: skip

    def __init__(self, machine: SourceMachine) -> None:
        self.machine = machine
        self.jobs: tuple = ()  # of the transfer thread, in order
        self.has_blocks = False
        self.is_computed = False
        self.num_granted = 0
        self.num_pushed = 0
        self.resend_indices: tuple[int, ...] = ()
        self.failed = False  # a write failed: the transfer thread skips what follows
        self.refused = False  # the sink's end of the channel turned a write away
        self.was_asked = False  # by the scheduler, in vain: it does not fit beside parked KV

    def freeze(self) -> tuple:
        m = self.machine
        return (m.state._value_, m.source_epoch, m.sink_epoch, m.grant_id, m.round, self.jobs, self.has_blocks,
                self.is_computed, self.num_granted, self.num_pushed, self.resend_indices, self.failed,
                self.refused, self.was_asked)  # fmt: skip

    @staticmethod
    def thaw(setting: Any, frozen: tuple) -> SourceRecord:
        state, source_epoch, sink_epoch, grant_id, round, *rest = frozen
        machine = setting.source_machine(source_epoch, sink_epoch, setting.source_rows)
        machine.state, machine.grant_id, machine.round = _SOURCE_STATES[state], grant_id, round
        record = SourceRecord(machine)
        (record.jobs, record.has_blocks, record.is_computed, record.num_granted, record.num_pushed,
         record.resend_indices, record.failed, record.refused, record.was_asked) = rest  # fmt: skip
        return record


class SinkRecord:
    __slots__ = ("bad_indices", "contents", "is_open", "machine", "pinned", "verifying")

    def __init__(self, machine: SinkMachine) -> None:
        self.machine = machine
        self.contents: tuple[str, ...] = ()  # of each granted block: unwritten, good, bad; (): holds none
        self.is_open = False  # the transport lets writes of the grant in
        self.pinned = False
        self.verifying = False
        self.bad_indices: tuple[int, ...] = ()

    def freeze(self) -> tuple:
        m = self.machine
        return (m.state._value_, m.sink_epoch, m.source_epoch, m.grant_id, m.round, m.source_lost, m.fenced,
                self.contents, self.is_open, self.pinned, self.verifying, self.bad_indices)  # fmt: skip

    @staticmethod
    def thaw(setting: Any, frozen: tuple) -> SinkRecord:
        state, sink_epoch, *numbers = frozen[:7]
        machine = setting.sink_machine(sink_epoch, setting.max_resends, setting.sink_rows)
        machine.state = _SINK_STATES[state]
        machine.source_epoch, machine.grant_id, machine.round, machine.source_lost, machine.fenced = numbers
        record = SinkRecord(machine)
        (record.contents, record.is_open, record.pinned, record.verifying, record.bad_indices) = frozen[7:]  # fmt: skip
        return record
