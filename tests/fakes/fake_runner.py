"""A device that executes each step one step late on a shadow of the pool's memory, and finds what must never happen.

A KV slot holds (block of tokens so far): the hash of the whole token prefix that ends in it. A row checks that every
slot it reads holds exactly its own sequence's prefix; so a wrong fork, a wrong cache hit, a block reused too early or
a lost token is an AssertionError. The next token is a function of the prefix and the sample index alone, so that
preemption, forks and caching must not change any output.
"""

from __future__ import annotations

import numpy as np

from tandem.engine.messages import TokenLogprobs
from tandem.engine.step import RunnerOutput, SchedulerOutput

VOCAB = 50


def next_token(prefix: tuple[int, ...], sample_index: int) -> int:
    return hash((prefix, sample_index, "next")) % VOCAB


class FakeHandle:
    def __init__(self, runner: FakeRunner, step_id: int) -> None:
        self._runner = runner
        self.step_id = step_id

    def done(self) -> bool:
        return False

    def result(self) -> RunnerOutput:
        """Only now does the step run: everything the scheduler did meanwhile came before it."""
        return self._runner.run_until(self.step_id)


class FakeRunner:
    """`memory[block, slot]` is the prefix whose last token's KV is there."""

    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.tables: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self.blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._queue: list[SchedulerOutput] = []
        self._results: dict[int, RunnerOutput] = {}
        self.num_rows = 0

    def execute(self, output: SchedulerOutput) -> FakeHandle:
        self._queue.append(output)
        return FakeHandle(self, output.step_id)

    def run_until(self, step_id: int) -> RunnerOutput:
        while step_id not in self._results:
            output = self._queue.pop(0)
            self._results[output.step_id] = self._run(output)
        return self._results.pop(step_id)

    def _run(self, output: SchedulerOutput) -> RunnerOutput:
        for new in output.new_slots:
            self.tables[new.slot] = [int(t) for t in new.token_ids]
            self.blocks[new.slot] = list(new.block_ids)
        for append in output.block_appends:
            blocks = self.blocks[append.slot]
            assert append.index in (len(blocks), len(blocks) - 1), "a block table has a hole"
            if append.index == len(blocks):
                blocks.append(append.block_id)
            assert blocks[append.index] == append.block_id
        for copy in output.copies:
            for slot in range(copy.num_tokens):
                self.memory[copy.destination, slot] = self.memory[copy.source, slot]
        prefixes = [self._row(row.slot, row.start, row.num_tokens) for row in output.rows]
        for fork in output.forks:
            self.tables[fork.slot] = self.tables[fork.parent_slot][: fork.num_tokens]
            self.blocks[fork.slot] = list(fork.block_ids)
        tokens = []
        for sample in output.samples:
            token = next_token(prefixes[sample.row], sample.sample_index)
            tokens.append(token)
            table = self.tables[sample.slot]
            del table[sample.position :]
            assert len(table) == sample.position, "a token is written behind a hole"
            table.append(token)
        logprobs = {
            index: [
                TokenLogprobs((position,), (0.0,), 1)
                for position in range(row.start + 1, row.start + row.num_tokens + 1)
            ]
            for index, row in enumerate(output.rows)
            if row.prompt_logprobs
        }
        return RunnerOutput(output.step_id, np.array(tokens, np.int32), [], logprobs)

    def _row(self, slot: int, start: int, num_tokens: int) -> tuple[int, ...]:
        table, blocks = self.tables[slot], self.blocks[slot]
        assert start + num_tokens <= len(table), "a row computes a token that nobody made"
        for position in range(start):
            where = (blocks[position // self.block_size], position % self.block_size)
            assert self.memory.get(where) == tuple(table[: position + 1]), f"slot {slot} reads foreign KV at {position}"
        for position in range(start, start + num_tokens):
            where = (blocks[position // self.block_size], position % self.block_size)
            self.memory[where] = tuple(table[: position + 1])
        self.num_rows += 1
        return tuple(table[: start + num_tokens])
