"""A sink's records, and the blocks that each of them holds. Decides nothing and sends nothing. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.sink_table import SinkMachine
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.record import OVER, UNTIL_SAFE, SinkRecord

TOMBSTONE_S = 120.0  # a guess


@dataclass
class SinkCounters:
    """What hand-offs to this node came to, since it started; for its metrics."""

    commits: int = 0
    recomputes: int = 0
    failures: int = 0
    digest_mismatches: int = 0
    foreign_messages: int = 0
    blocks_quarantined: int = 0
    quarantines_overdue: int = 0

    def as_dict(self) -> dict[str, float]:
        return {f"sink_{name}": float(value) for name, value in vars(self).items()}


class SinkLedger:
    """The records of one sink. Whoever brings an event sets the time (monotonic seconds) with `at`.

    Blocks: `hits` (pinned prefix, shared) and `granted` (to be written by the source) of each record hold one
    reference each until the machine says COMMIT, UNPIN or FREE."""

    def __init__(self, info: NodeInfo, pool: BlockPool, options: NodeOptions) -> None:
        self.info, self.pool = info, pool
        self.block_size = options.cache.block_size
        self.counters = SinkCounters()
        self.now = 0.0
        self.records: dict[AttemptKey, SinkRecord] = {}
        self.live: dict[AttemptKey, SinkRecord] = {}  # without the thousands that have ended, which hold no blocks
        self._connect_s = options.timeouts.connect_s
        self._tombstones: deque[SinkRecord] = deque()  # in the order of their ends

    def at(self, now: float) -> None:
        """Sets the time, in monotonic seconds. Must be called before each event is brought."""
        self.now = now

    # --- records --------------------------------------------------------------------------------------------

    def open(self, key: AttemptKey) -> SinkRecord:
        """The record of this hand-off, a new one if there is none."""
        record = self.records.get(key)
        if record is None:
            record = SinkRecord(key, SinkMachine(self.info.epoch), deadline=self.now + self._connect_s)
            self.records[key] = self.live[key] = record
        return record

    def of_source(self, source: NodeKey) -> list[SinkRecord]:
        return [each for each in self.records.values() if each.source == source]

    def bury(self, record: SinkRecord) -> None:
        """Keeps a record that has ended as a tombstone."""
        record.closed_at = record.closed_at or self.now
        self._tombstones.append(self.live.pop(record.key))

    def forget(self, record: SinkRecord) -> None:
        del self.live[record.key], self.records[record.key]

    def forget_old_tombstones(self) -> None:
        while self._tombstones and self.now - self._tombstones[0].closed_at > TOMBSTONE_S:
            del self.records[self._tombstones.popleft().key]

    # --- blocks ---------------------------------------------------------------------------------------------

    def num_blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room_for(self, num_tokens: int) -> bool:
        """Whether so many tokens would fit into an empty pool."""
        return self.pool.cost(self.num_blocks_of(num_tokens)) <= self.pool.num_blocks

    def num_bare(self, record: SinkRecord) -> int:
        """How many of the granted blocks come without window blocks: nothing of those is read here."""
        num_blocks = record.num_blocks - record.first_block
        return min(num_blocks, max(0, record.first_window - record.first_block)) if self.pool.windows.num_each else 0

    def num_needed(self, record: SinkRecord) -> int:
        """How many blocks a grant takes."""
        return self.pool.cost(record.num_blocks - record.first_block, self.num_bare(record))

    def granted_ids(self, record: SinkRecord) -> tuple[int, ...]:
        """The list of a grant: its blocks, each with its window blocks if they come."""
        bare, whole = record.granted[: self.num_bare(record)], record.granted[self.num_bare(record) :]
        return (*bare, *(each for block_id in whole for each in (block_id, *self.pool.windows.of(block_id))))

    def pin(self, record: SinkRecord) -> None:
        """Pins this node's own prefix of the prompt, ending below its last token whose KV is handed over. At its grant
        a request pins again: others with the same prefix may have brought more of it meanwhile."""
        request = record.request
        if request is None or not request.prompt.use_prefix_cache:
            return
        last_full = (request.num_prompt_tokens - 1 - (record.kind is HandoffKind.SEQUENCE)) // self.block_size
        found = self.pool.match_prefix(request.block_hashes[: max(0, last_full)])[record.num_passed :]
        read = found[record.first_window :] if self.pool.windows.num_each else []
        lacks = next((place for place, each in enumerate(read) if not self.pool.windows.is_whole(each)), len(read))
        del found[len(found) - len(read) + lacks :]
        if len(found) > len(record.hits):
            self.pool.touch(found)
            self.unpin(record)
            record.hits = found
            record.hold = self.pool.reservations.add(Kind.HITS, len(found), partial(self.unpin, record), record)

    def pass_over(self, record: SinkRecord, first_kept: int = 0) -> None:
        """Leaves out what no step will read: what is before every window of the prompt's end, and what a running
        sequence's source has freed, which is before token `first_kept`."""
        assert record.request is not None
        # The first row here is that of a running sequence's newest token, or of the one behind a prompt.
        next_row = record.request.num_prompt_tokens - (record.kind is HandoffKind.SEQUENCE)
        passed = self.pool.window.num_passed(next_row)
        passed = min(max(passed, first_kept // self.block_size), record.num_blocks - 1)
        if self.pool.windows.num_each:
            record.first_window = passed
            return
        needless = passed - record.num_passed
        record.num_passed = passed
        self.pool.free(record.hits[:needless], None)
        del record.hits[:needless]
        if not record.hits:
            self.unpin(record)

    def may_take(self, record: SinkRecord) -> bool:
        """Whether this node can go on without what the source has freed: it must know the window, and its blocks must
        begin where the source's do."""
        num_freed, rest = divmod(record.first_kept, self.block_size)
        return not rest and num_freed <= self.pool.window.num_passed(record.num_tokens)

    def unpin(self, record: SinkRecord) -> None:
        self.pool.free(record.hits, None)
        self.pool.free(record.into, None)
        self.pool.reservations.end(record.hold)
        record.hits, record.into, record.hold = [], [], None

    def grant(self, record: SinkRecord, blocks: list[int]) -> None:
        """Gives `blocks` to a record. From here on nobody can ask it to give back what it holds: its blocks become the
        request's, or wait in quarantine until they are safe."""
        self.pool.reservations.end(record.hold)
        record.granted, record.into, record.hold = blocks, [], None

    def free_granted(self, record: SinkRecord, first: int = 0) -> None:
        """Gives back what was granted from index `first` on."""
        self.pool.free(record.granted[first:], None)
        del record.granted[first:]

    def shorten(self, record: SinkRecord, num_tokens: int) -> None:
        """Frees the granted blocks beyond `num_tokens`, the length of a sequence at its end: its source wrote none of
        them."""
        record.num_tokens, record.num_blocks = num_tokens, self.num_blocks_of(num_tokens)
        self.free_granted(record, record.num_blocks - record.first_block)

    def take(self, record: SinkRecord) -> tuple[int, ...]:
        """Takes the request's blocks out of the record and returns them. Where others with the same prefix have brought
        a block since the grant, theirs takes the place of the one that came again: the block is kept once, which leaves
        room, and decodes read it together."""
        blocks = [*self.pool.passed(record.num_passed), *record.hits, *record.granted]
        request = record.request
        record.hits, record.granted = [], []
        if request is None or not request.prompt.use_prefix_cache:
            return tuple(blocks)
        known = self.pool.match_prefix(request.block_hashes[: record.num_tokens // self.block_size])
        twice = [index for index in range(record.num_passed, len(known)) if known[index] != blocks[index]]
        is_whole = self.pool.windows.is_whole
        twice = [index for index in twice if index < record.first_window or is_whole(known[index])]
        self.pool.touch(known[index] for index in twice)
        self.pool.free([blocks[index] for index in twice], None)
        for index in twice:
            blocks[index] = known[index]
        return tuple(blocks)

    # --- out ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether no hand-off is under way. Quarantined blocks don't count: they die with this process."""
        return all(r.machine.state in (*OVER, *UNTIL_SAFE) for r in self.live.values())

    @property
    def num_quarantined(self) -> int:
        return sum(len(r.granted) for r in self.live.values() if r.machine.state is S.QUARANTINED)

    def check_integrity(self) -> None:
        assert len(self.records) == len(self.live) + len(self._tombstones)
        for record in self.records.values():
            state = record.machine.state
            held = [*record.hits, *record.into, *record.granted]
            assert state not in OVER or not held, f"{record.key} is over and holds blocks"
            assert state is not S.QUARANTINED or not record.hits, f"{record.key} is over and pins hits"
            can_give_back = bool(record.hits) and state in (S.EXPECTING, S.QUEUED)
            assert (record.hold is not None) == can_give_back, f"{record.key} is {state} and pins {record.hits}"
            for block_id in held:
                assert self.pool.ref_count(block_id) > 0, f"{record.key} holds block {block_id}, which is free"
