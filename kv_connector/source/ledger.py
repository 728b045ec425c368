"""A source's records, and the blocks that each of them holds. Decides nothing and sends nothing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.source_table import SourceMachine
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.record import NO_STEP, OVER, SourceRecord

_PARKED = (S.PARKED, S.PARKED_DONE)
_UNFINISHED = (S.CLAIMING, S.PUSHING)


def _keep() -> None:
    """Gives nothing back when room is asked for: a hand-off that has claimed, or waits for a grant, is ended by its
    sink."""


@dataclass
class SourceCounters:
    """What hand-offs from this node came to, since it started; for its metrics."""

    handoffs_completed: int = 0
    handoffs_failed: int = 0
    grants_refused: int = 0
    messages_dropped: int = 0  # for no live hand-off, or of a kind that sources don't take
    events_dropped: int = 0  # stale or for no live hand-off, whoever they came from
    verbs_resent: int = 0
    retires_overdue: int = 0

    def as_dict(self) -> dict[str, float]:
        return {f"source_{name}": float(value) for name, value in vars(self).items()}


class SourceLedger:
    """The records of one source, and the reservations of their blocks. `now` is the time of the last event."""

    def __init__(self, info: NodeInfo, pool: BlockPool, options: NodeOptions) -> None:
        self.info, self.pool = info, pool
        self.block_size = options.cache.block_size
        self.counters = SourceCounters()
        self.now = 0.0
        self.records: dict[AttemptKey, SourceRecord] = {}

    def at(self, now: float) -> None:
        """Sets the time, in monotonic seconds. Must be called before each event is brought."""
        self.now = now

    def add(self, key: AttemptKey, kind: HandoffKind, peer: PeerRef, num_tokens: int, deadline: float) -> SourceRecord:
        assert key not in self.records, "each hand-off is begun once"
        record = self.records[key] = SourceRecord(
            key=key,
            kind=kind,
            peer=peer,
            num_prompt_tokens=num_tokens,
            num_blocks=self.pool.cost(-(-num_tokens // self.block_size)),
            block_sizes=BlockSizes(self.block_size, self.block_size),
            deadline=deadline,
            machine=SourceMachine(self.info.epoch, peer.epoch),
            windows=self.pool.windows,
        )
        return record

    def of_sink(self, sink: NodeKey) -> list[SourceRecord]:
        return [each for each in self.records.values() if each.peer.key == sink]

    def book(self, record: SourceRecord) -> None:
        """Books the record's blocks in the pool's reservations under its present kind; called after every change.
        Parked and claimed hand-offs must fit beside each other. A request that the scheduler wants to start, but that
        can't claim until parked ones have left, counts as claimed, or new ones would keep it out."""
        if record.kind is HandoffKind.CHUNK:
            return  # its blocks are those of a request that runs
        state = record.machine.state
        was_asked = state is S.IDLE and record.request is not None
        kind = Kind.PARKED if state in _PARKED else Kind.CLAIMED if state in _UNFINISHED or was_asked else None
        self.book_as(record, kind)

    def book_as(self, record: SourceRecord, kind: Kind | None) -> None:
        if kind is not (None if record.hold is None else record.hold.kind):
            self.pool.reservations.end(record.hold)
            add = self.pool.reservations.add
            record.hold = None if kind is None else add(kind, record.num_blocks, _keep, record)

    def hold(self, record: SourceRecord, block_ids: Sequence[int]) -> None:
        """Takes a reference to each block, beside the scheduler's."""
        num_held = len(record.block_ids)
        assert list(block_ids[:num_held]) == record.block_ids, "a running sequence's blocks stay where they are"
        self.pool.touch(block_ids[num_held:])
        record.block_ids, record.owns_blocks = list(block_ids), True

    def free(self, record: SourceRecord) -> None:
        if record.owns_blocks:
            self.pool.free(record.block_ids, record.last_step if record.last_step != NO_STEP else None)
            record.block_ids, record.owns_blocks = [], False

    @property
    def is_idle(self) -> bool:
        return all(record.machine.state in OVER for record in self.records.values())

    def check_integrity(self) -> None:
        for record in self.records.values():
            if record.owns_blocks:
                assert record.machine.state not in OVER, f"{record.key} is over and holds blocks"
                for block_id in record.block_ids:
                    assert self.pool.ref_count(block_id) > 0, f"{record.key} holds block {block_id}, which is free"
