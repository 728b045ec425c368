"""What an exploration of the hand-off is about: sizes, bounds, transport, tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.kv_connector.protocol import sink_table, source_table
from tandem.kv_connector.protocol.sink_table import SinkMachine
from tandem.kv_connector.protocol.source_table import SourceMachine

ALL_FAULTS = frozenset(
    {
        "lose", "duplicate", "corrupt", "crash_source", "crash_sink", "cancel", "source_deadline", "sink_deadline",
        "lease", "suspect_source", "suspect_sink", "push_fails", "all_finished", "forget", "reconnect",
    }
)  # fmt: skip


class ViolationError(AssertionError):
    """The protocol broke a promise."""


@dataclass(frozen=True)
class Setting:
    """What is explored. Sizes are in blocks; a prompt has `granted[r] + hits[r]` of them."""

    name: str = ""
    granted: tuple[int, ...] = (1, 1)
    pulls: tuple[int, ...] = ()  # requests that the sink begins: it pulls what the source has cached
    hits: tuple[int, ...] = (0, 0)  # of each prompt's own prefix, cached on the sink
    source_blocks: int = 4
    max_parked: int = 4
    sink_blocks: int = 4
    one_sided: bool = True  # shm: the source stores; False, tcp: the sink receives, close_grant ends all writes
    is_revocable: bool = False  # one-sided, and yet a fence ends while the source lives: it takes old grants away
    max_faults: int = 1
    faults: frozenset[str] = ALL_FAULTS
    max_resends: int = 1
    claims_what_fits: bool = True  # a source claims only what fits beside its parked KV
    submitted: bool = False  # start with every request known to both nodes
    flaws: frozenset[str] = frozenset()  # mutations of the world
    source_rows: source_table.SourceRows = field(default_factory=lambda: source_table._ROWS, repr=False)
    sink_rows: sink_table.SinkRows = field(default_factory=lambda: sink_table._ROWS, repr=False)
    source_machine: type[SourceMachine] = SourceMachine
    sink_machine: type[SinkMachine] = SinkMachine

    @property
    def fences_living(self) -> bool:
        return self.is_revocable or not self.one_sided

    @property
    def num_requests(self) -> int:
        return len(self.granted)
