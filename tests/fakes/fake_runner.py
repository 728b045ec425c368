"""A device that executes each step as late as the step loop allows, on a shadow of the pool's memory.

A KV slot of the shadow holds the whole token prefix that ends in it. Before a step writes anything, each row checks
that every slot it reads holds exactly its own sequence's prefix; so a wrong fork, a wrong cache hit, a block reused
too early, a lost token or a read of what only this step writes is an AssertionError. So is a write into a block that
was granted to a peer meanwhile. The next token is a function of prefix and sample index alone: preemption, forks,
caching and batching must not change any output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW
from tandem.engine.contracts.hashing import hash_blocks
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import Candidates, TokenLogprobs
from tandem.engine.scheduling.beams.search import num_candidates
from tandem.engine.scheduling.step import NewSlot, RunnerOutput, SampleRow, ScheduledRow, SchedulerOutput, WrittenSlots
from tandem.kv_connector.protocol.jobs import StepMoves

VOCAB = 13
Prefix = tuple[int, ...]


def next_token(prefix: Sequence[int], sample_index: int, banned: Collection[int] = ()) -> int:
    """The model and sampler of the fake: hashes of int tuples are the same in every process."""
    token = hash((sample_index, *prefix, len(prefix))) % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def next_candidates(
    prefix: Sequence[int], output_index: int, sampling: SamplingParams, eos_token_ids: Iterable[int]
) -> Candidates:
    """What may follow a beam, as next_token is made."""
    banned = stop_ids(sampling, eos_token_ids) if output_index < sampling.min_tokens else set()
    scored = sorted((-(hash((*prefix, token, len(prefix))) % 991) / 100, token) for token in set(range(VOCAB)) - banned)
    best = scored[::-1][: num_candidates(sampling, len(stop_ids(sampling, eos_token_ids)))]
    return Candidates(tuple(token for _, token in best), tuple(score for score, _ in best))


def stop_ids(sampling: SamplingParams, eos_token_ids: Iterable[int]) -> set[int]:
    return {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}


class FakeHandle:
    def __init__(self, runner: FakeRunner, step_id: int) -> None:
        self._runner = runner
        self.step_id = step_id

    def done(self) -> bool:
        return False

    def sample(self) -> None: ...

    def result(self) -> RunnerOutput:
        """Only now does the step run: everything the host did meanwhile came before it."""
        return self._runner.run_until(self.step_id)


class FakeRunner:
    """`memory[block_id][offset]` is the prefix whose last token's KV is there."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int, eos_token_ids: Sequence[int] = ()) -> None:
        self.block_size = block_size
        self.memory: list[dict[int, Prefix]] = [{} for _ in range(num_blocks)]
        self.peer_blocks: set[int] = set()  # granted: only the peer may write them
        self.on_launch: Callable[[], None] = lambda: None
        self.num_rows = 0
        self.num_computed_tokens = 0
        self.saturating: set[int] = set()  # tokens whose KV does not fit into the pool's dtype
        self.num_overflows = 0
        self.failing: set[int] = set()  # steps that run out of memory
        self.window = NO_WINDOW.num_tokens  # a row reads no further back
        self._doomed: set[int] = set()  # launched before the one before them was seen to fail
        self._eos_token_ids = tuple(eos_token_ids)
        self._tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._block_tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.num_windows = 0  # lists of window blocks, of layers that see `window` tokens; others then see all
        self._window_tables: list[list[list[int]]] = [[] for _ in range(max_num_seqs)]
        self._settings: list[NewSlot | None] = [None] * max_num_seqs
        self.takes_adapters = True  # a draft model takes none
        self._adapters: dict[int, bytes] = {}  # in their slots; the seed of a sequence says which is its own
        self._queue: list[SchedulerOutput] = []
        self._results: dict[int, RunnerOutput] = {}

    def execute(self, output: SchedulerOutput, between_layers: object = None) -> FakeHandle:
        assert output.rows, "a step without a row"
        self.on_launch()
        self._queue.append(output)
        return FakeHandle(self, output.step_id)

    def run_until(self, step_id: int) -> RunnerOutput:
        while step_id not in self._results:
            output = self._queue.pop(0)
            self._results[output.step_id] = self._run(output)
        return self._results.pop(step_id)

    # --- a peer that writes without the stream --------------------------------------------------------------

    def peer_writes(self, block_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """KV of `tokens`, as another node would push it."""
        for position in range(len(tokens)):
            block_id = block_ids[position // self.block_size]
            self.memory[block_id][position % self.block_size] = tuple(tokens[: position + 1])

    # --- one step -------------------------------------------------------------------------------------------

    def _run(self, output: SchedulerOutput) -> RunnerOutput:
        self._patch(output)
        if output.step_id in self.failing | self._doomed:
            return self._fail(output)
        self._copy(output)
        if isinstance(output.connector_meta, StepMoves):
            for load in output.connector_meta.loads:
                load.start(None)  # type: ignore[arg-type]
        drafted = {sample.row for sample in output.samples if sample.draft >= 0}
        slots = [row.slot for row in output.rows]
        own = [row.slot for index, row in enumerate(output.rows) if index not in drafted]
        assert len(set(own)) == len(own), "a slot has two rows"
        for index, row in enumerate(output.rows):
            if index not in drafted:
                self._check_reads(row)
        written: set[tuple[int, int]] = set()
        for row in output.rows:
            self._write(row, written)
        for index in drafted:  # they read what the rows before them write
            self._check_reads(output.rows[index])
        for fork in output.forks:
            assert fork.slot not in slots, "a fork goes into a slot that is in use"
            self._tables[fork.slot] = self._tables[fork.parent_slot][: fork.num_tokens]
            self._take_tables(fork.slot, fork.block_ids, fork.window_ids)
            self._settings[fork.slot] = self._settings[fork.parent_slot]
        prefixes = [tuple(self._tables[row.slot][: row.start + row.num_tokens]) for row in output.rows]
        tokens = [self._sample(sample, prefixes[sample.row]) for sample in output.samples]
        logprobs = [TokenLogprobs((token,), (0.0,), 1) for token in tokens]
        result = RunnerOutput(output.step_id, np.array(tokens, np.int32), list(logprobs), self._prompt_logprobs(output))
        for index, sample in enumerate(output.samples):
            new = self._settings[sample.slot]
            if new is not None and new.sampling.beam_width:
                given = next_candidates(prefixes[sample.row], sample.output_index, new.sampling, self._eos_token_ids)
                result.candidates[index] = given
        result.num_overflows = self.num_overflows
        return result

    def find_saturated(self, written: Sequence[WrittenSlots]) -> set[int]:
        """See EngineCore."""
        return {
            each.block_id
            for each in written
            for slot in range(each.start, each.end)
            if self.memory[each.block_id].get(slot, (0,))[-1] in self.saturating
        }

    def _fail(self, output: SchedulerOutput) -> RunnerOutput:
        """Leaves rubbish wherever KV was to be written. Steps that were launched meanwhile compute with it."""
        for row in output.rows:
            for position in range(row.start, row.start + row.num_tokens):
                for block_id, offset in self._all_places(row.slot, position):
                    self.memory[block_id][offset] = (-1,)
        for copy in output.copies:
            self.memory[copy.destination] = dict.fromkeys(range(self.block_size), (-1,))
        for fork in output.forks:
            self._take_tables(fork.slot, fork.block_ids, fork.window_ids)
        if output.step_id in self.failing:
            self._doomed |= {later.step_id for later in self._queue}
            return RunnerOutput(output.step_id, np.empty(0, np.int32), failure="no memory")
        tokens = np.zeros(len(output.samples), np.int32)
        return RunnerOutput(output.step_id, tokens, [TokenLogprobs((0,), (0.0,), 1) for _ in tokens])

    def _patch(self, output: SchedulerOutput) -> None:
        for load in output.adapter_loads:
            self._adapters[load.slot] = load.ref.digest
        for new in output.new_slots:
            self._tables[new.slot] = new.token_ids.tolist()
            self._take_tables(new.slot, new.block_ids, new.window_ids)
            self._settings[new.slot] = new
        for append in output.block_appends:
            table = self._tables_of(append.slot)[append.table]
            assert append.index <= len(table), "a block table has a hole"
            is_passed = append.block_id == len(self.memory)
            assert is_passed == (append.index < len(table)), "a block table is written twice"
            table[append.index : append.index + 1] = [append.block_id]
        for sample in output.samples:
            if sample.draft >= 0:
                table = self._tables[sample.slot]
                del table[sample.position - 1 :]
                assert len(table) == sample.position - 1, "a draft behind a hole"
                table.append(sample.draft)

    def _copy(self, output: SchedulerOutput) -> None:
        """All sources are read before anything is written: copies of one step may run in any order."""
        sources = {copy.source for copy in output.copies}
        read = [dict(self.memory[copy.source]) for copy in output.copies]
        for copy, cells in zip(output.copies, read, strict=True):
            assert copy.destination not in sources, "copies of one step depend on their order"
            assert copy.destination not in self.peer_blocks, "a copy writes into a block granted to a peer"
            assert all(offset in cells for offset in range(copy.num_tokens)), "a copy of what was never written"
            self.memory[copy.destination].update({offset: cells[offset] for offset in range(copy.num_tokens)})

    def _take_tables(self, slot: int, block_ids: Sequence[int], window_ids: Sequence[Sequence[int]]) -> None:
        assert len(window_ids) == self.num_windows
        self._block_tables[slot], self._window_tables[slot] = list(block_ids), [list(each) for each in window_ids]
        assert all(len(each) == len(block_ids) for each in window_ids), "a block without a place for window blocks"

    def _tables_of(self, slot: int) -> list[list[int]]:
        return [self._block_tables[slot], *self._window_tables[slot]]

    def _all_places(self, slot: int, position: int) -> list[tuple[int, int]]:
        index, offset = divmod(position, self.block_size)
        return [(table[index], offset) for table in self._tables_of(slot)]

    def _check_reads(self, row: ScheduledRow) -> None:
        table, new = self._tables[row.slot], self._settings[row.slot]
        assert new is not None
        adapter = self._adapters[new.adapter] if new.adapter else b""
        own = bytes([new.sampling.seed]) if new.sampling.seed and self.takes_adapters else b""
        assert adapter == own, "a row takes another's adapter"
        assert row.num_tokens > 0, "a row without a token has no logits"
        assert row.start + row.num_tokens <= len(table), "a row computes a token that nobody made"
        in_window = max(0, row.start - self.window + 1)
        for position in range(0 if self.num_windows else in_window, row.start):
            places = self._all_places(row.slot, position)
            for block_id, offset in places if position >= in_window else places[:1]:
                held = self.memory[block_id].get(offset)
                assert held == tuple(table[: position + 1]), (
                    f"slot {row.slot} reads foreign KV at {position} in block {block_id}"
                )

    def _write(self, row: ScheduledRow, written: set[tuple[int, int]]) -> None:
        table = self._tables[row.slot]
        for position in range(row.start, row.start + row.num_tokens):
            for block_id, offset in self._all_places(row.slot, position):
                granted = f"a step writes into block {block_id}, which is granted to a peer"
                assert block_id not in self.peer_blocks, granted
                assert (block_id, offset) not in written, f"two rows write slot {offset} of block {block_id}"
                written.add((block_id, offset))
                self.memory[block_id][offset] = tuple(table[: position + 1])
            self.num_overflows += table[position] in self.saturating
        self.num_rows += 1
        self.num_computed_tokens += row.num_tokens

    def _sample(self, sample: SampleRow, prefix: Prefix) -> int:
        new = self._settings[sample.slot]
        assert new is not None
        assert sample.position == len(prefix), "a sample that does not follow its row"
        assert sample.output_index == sample.position - new.num_prompt_tokens
        banned = stop_ids(new.sampling, self._eos_token_ids) if sample.output_index < new.sampling.min_tokens else set()
        token = next_token(prefix, sample.sample_index, banned)
        table = self._tables[sample.slot]
        del table[sample.position :]
        assert len(table) == sample.position, "a token is written behind a hole"
        table.append(token)
        return token

    def _prompt_logprobs(self, output: SchedulerOutput) -> dict[int, list[TokenLogprobs]]:
        """Each entry's rank is its position, so that tests see which one they got."""
        entries = {}
        for index, row in enumerate(output.rows):
            new = self._settings[row.slot]
            if row.prompt_logprobs and new is not None:
                last = min(row.start + row.num_tokens, new.num_prompt_tokens - 1)
                entries[index] = [
                    TokenLogprobs((self._tables[row.slot][position],), (0.0,), position)
                    for position in range(row.start + 1, last + 1)
                ]
        return entries

    # --- what the cache promises ----------------------------------------------------------------------------

    def check_cached(self, pool: BlockPool, roots: Collection[bytes]) -> None:
        """Every published block holds the tokens that its hash names."""
        published = set(pool.cached_hashes())
        for block_id in range(pool.num_blocks):
            block_hash = pool.block_hash(block_id)
            for each in (block_id, *pool.windows.of(block_id)) if block_hash in published else ():
                assert len(self.memory[each]) == self.block_size, f"cached block {each} is not full"
                prefix = self.memory[each][self.block_size - 1]
                cells = [self.memory[each][offset] for offset in range(self.block_size)]
                start = len(prefix) - self.block_size
                assert cells == [prefix[: start + i + 1] for i in range(self.block_size)], "a cached block is torn"
                tokens = np.array(prefix, np.int32)
                found = {hash_blocks(tokens, self.block_size, root)[-1] for root in roots}
                assert block_hash in found, f"cached block {block_id} holds other tokens than its hash says"


class FakeDraft(FakeRunner):
    """A draft model: draws what the served model does, but for every `wrong_every`th token (0: all are right)."""

    def __init__(
        self, num_blocks: int, block_size: int, max_num_seqs: int, eos_token_ids: Sequence[int], wrong_every: int = 0
    ) -> None:
        super().__init__(num_blocks, block_size, max_num_seqs, eos_token_ids)
        self.takes_adapters = False
        self._wrong_every, self._num_drawn = wrong_every, 0

    def _write(self, row: ScheduledRow, written: set[tuple[int, int]]) -> None:
        super()._write(row, set())  # sequences that share a block may write the same to its twin

    def _sample(self, sample: SampleRow, prefix: Prefix) -> int:
        known = self._tables[sample.slot][sample.position :]
        token = super()._sample(sample, prefix)
        self._num_drawn += 1
        if self._wrong_every and self._num_drawn % self._wrong_every == 0:
            token = self._tables[sample.slot][-1] = (token + 1) % VOCAB
        if known:  # a known token's place, and nobody reads there again
            self._tables[sample.slot][sample.position :] = known
        return token

    def _fail(self, output: SchedulerOutput) -> RunnerOutput:
        result = super()._fail(output)
        self._doomed |= {output.step_id}
        self.failing.discard(output.step_id)
        return result
