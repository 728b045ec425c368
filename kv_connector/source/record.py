"""A source's record of one hand-off beside its protocol state: what is known of it, and what is yet to be pushed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tandem.engine.blocks.reservations import Hold
from tandem.engine.blocks.window_blocks import WindowBlocks
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.engine.contracts.wire.parts import Continuation, FirstToken, PeerRef
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.layouts.granted_blocks import Entry, GrantedBlocks
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.protocol.jobs import BlockPush, Finalize, digest_key
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.source_table import SourceMachine
from tandem.kv_connector.protocol.source_table import SourceState as S

NO_STEP = -1
OVER = (S.DRAINED, S.CLOSED)


@dataclass(eq=False, slots=True)
class SourceRecord:
    """One hand-off from this node: its protocol state, its blocks, and how far it is pushed. Times are monotonic
    seconds."""

    key: AttemptKey
    kind: HandoffKind
    peer: PeerRef
    num_prompt_tokens: int
    num_blocks: int  # of the prompt, of this node's size, with window blocks
    block_sizes: BlockSizes
    deadline: float
    machine: SourceMachine
    windows: WindowBlocks  # of this node's blocks
    resend_at: float = 0.0
    resend_every_s: float = 0.0
    reason: str = ""
    closed_at: float = 0.0
    retire_asked_at: float = 0.0  # when the transfer thread was told to retire the grant; 0: not yet
    was_warned: bool = False  # whether the log says already that this takes long
    num_drops_counted: int = 0
    first_kept: int = 0  # the first token whose block a running sequence still has

    hold: Hold | None = None  # in the order of those who wait with blocks
    request: Request | None = None  # while the scheduler has it
    block_ids: list[int] = field(default_factory=list)
    owns_blocks: bool = False  # the scheduler has left them to us
    num_computed_tokens: int = 0  # by launched steps
    last_step: int = NO_STEP  # newest step that has a row of this request

    grant: KVGrant | None = None
    num_pushed_blocks: int = 0  # sink blocks of the prompt that need no push any more, the sink's own included
    resend_indices: tuple[int, ...] = ()
    first_tokens: tuple[FirstToken, ...] = ()
    ready: KVReady | None = None
    continuation: Continuation | None = None  # how a sequence goes on; set when it stands still
    coming_block_ids: list[int] = field(default_factory=list)  # of a chunk: all; `block_ids` are complete
    is_awaited: bool = False  # the sink needs it layer by layer
    is_flushed: bool = True  # whether all that was pushed of a sequence has arrived

    @property
    def num_sink_blocks(self) -> int:
        """The prompt's length in blocks of the sink's size, in which grants, pushes and resends count."""
        return self.block_sizes.num_sink_blocks(self.num_prompt_tokens)

    @property
    def blocks_each(self) -> int:
        return 1 + self.windows.num_each

    @property
    def granted(self) -> GrantedBlocks:
        assert self.grant is not None
        return GrantedBlocks(self.grant.first_block, self.grant.first_window, self.blocks_each)

    # --- progress -------------------------------------------------------------------------------------------

    def blocks_allocated(self, block_ids: Sequence[int], num_computed_tokens: int) -> None:
        """Takes the request's new list of all its blocks. One that doesn't continue the old list means a restart after
        preemption: the pushes start over (they are queued behind the old ones, so the right bytes win)."""
        is_restart = list(block_ids[: len(self.block_ids)]) != self.block_ids
        if is_restart or not self.block_ids:
            self.num_computed_tokens = num_computed_tokens
            self.num_pushed_blocks = self.grant.first_block if self.grant else 0
        self.block_ids = list(block_ids)

    def step_built(self, step_id: int, num_computed_tokens: int) -> None:
        self.last_step = step_id
        self.num_computed_tokens = num_computed_tokens

    def adopt(self, grant: KVGrant) -> None:
        self.grant = grant
        self.num_pushed_blocks = grant.first_block

    # --- what to push ---------------------------------------------------------------------------------------

    def take_layer_pushes(self) -> list[BlockPush]:
        """The pushes, one for each block table, of the blocks that the step built last completes. Call
        `take_whole_push` for older blocks first."""
        blocks = self._take(self._num_complete(self.num_computed_tokens))
        is_awaited = self.is_awaited and blocks.stop == self.num_sink_blocks
        entries = list(self.granted.entries(blocks))
        by_table = {table: [each for each in entries if each[1] == table] for table in range(self.blocks_each)}
        return [
            BlockPush(step_id=self.last_step, is_awaited=is_awaited, table=table, **self._pairs(each))
            for table, each in by_table.items()
            if each
        ]

    def take_whole_push(self, num_tokens: int, step_id: int) -> BlockPush | None:
        """The push of all blocks complete within `num_tokens` that were not pushed; step `step_id` is the last to write
        them. None if there is no such block."""
        blocks = self._take(self._num_complete(num_tokens))
        return BlockPush(step_id=step_id, **self._pairs(self.granted.entries(blocks))) if blocks else None

    def push_again(self) -> BlockPush:
        """The push of the blocks that the last KVResend names by their indices into the grant."""
        assert self.grant is not None
        entries = list(self.granted.entries(range(self.grant.first_block, self.num_sink_blocks)))
        return BlockPush(step_id=self.last_step, **self._pairs([entries[index] for index in self.resend_indices]))

    def finalize(self, round: int, with_digests: bool) -> Finalize:
        assert self.grant is not None
        assert self.num_pushed_blocks == self.num_sink_blocks, "KVReady would name blocks that were not pushed"
        every = self.granted.entries(range(self.grant.first_block, self.num_sink_blocks))
        source_block_ids, first_slots = self._origins(list(every))
        return Finalize(
            key=self.key,
            grant=self.grant,
            round=round,
            source_block_ids=source_block_ids,
            first_slots=first_slots,
            num_valid_last=self._num_valid(self.num_sink_blocks - 1),
            digest_key=digest_key(self.key, self.grant.grant_id),
            first_tokens=self.first_tokens,
            with_digests=with_digests,
            continuation=self.continuation,
            num_blocks=self.granted.count(self.num_sink_blocks),
        )

    def _take(self, until: int) -> range:
        """The blocks up to `until` that were not pushed, which now are."""
        blocks = range(self.num_pushed_blocks, max(until, self.num_pushed_blocks))
        self.num_pushed_blocks = blocks.stop
        return blocks

    def _pairs(self, entries: Iterable[Entry]) -> dict:
        assert self.grant is not None
        granted, entries = self.granted, list(entries)
        source_block_ids, first_slots = self._origins(entries)
        return {
            "key": self.key,
            "grant": self.grant,
            "source_block_ids": source_block_ids,
            "first_slots": first_slots,
            "destination_block_ids": tuple(self.grant.block_ids[granted.index(entry)] for entry in entries),
            "num_valid": tuple(self._num_valid(block) for block, _ in entries),
        }

    def _origins(self, entries: Sequence[Entry]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The (source_block_ids, first_slots) of a job that pushes these sink blocks of the prompt; see BlockPush."""
        ids = self.block_ids
        if self.block_sizes.source == self.block_sizes.sink:
            every = [(ids[block], *self.windows.of(ids[block])) for block, _ in entries]
            return tuple(each[table] for each, (_, table) in zip(every, entries, strict=True)), ()
        origins = [self.block_sizes.origin(block, self._num_valid(block)) for block, _ in entries]
        block_ids = tuple(self.block_ids[block] for blocks, _ in origins for block in blocks)
        return block_ids, tuple(first_slot for _, first_slot in origins)

    def _num_complete(self, num_tokens: int) -> int:
        """The number of sink blocks of which this node has every token."""
        if num_tokens >= self.num_prompt_tokens:
            return self.num_sink_blocks
        return num_tokens // self.block_sizes.sink

    def _num_valid(self, sink_block: int) -> int:
        return self.block_sizes.num_valid(sink_block, self.num_prompt_tokens)
