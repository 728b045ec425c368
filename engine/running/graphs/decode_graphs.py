"""Small steps as CUDA graphs: one replay runs the whole forward pass, from slots to logits.

A decode step brings one token a sequence. A short chunk of a prompt can come as well, each of its tokens as a row of
its own, and so do guesses behind a sequence's newest token: the rows store their keys before any of them reads, and
each reads as far as its own position (not so in the smallest graphs of decodes, see `graph_for`). Launched kernel by
kernel, such a step would take the host several times as long as it takes the device.

Each graph has a fixed number of rows; a step takes the smallest that holds its rows and pads with slot -1. All graphs
read the same input buffers and share one memory pool, since only one runs at a time. Nothing in a graph depends on
lengths: they are read on the device, as are the prefixes that rows share, for which there is a second, coarser ladder
of graphs. A third one, as coarse, is for steps in which some row takes an adapter; they read what rows share row by
row. A fourth has steps of few rows of which some are one sequence's, where decodes alone attend in one launch.

Shape legend: R rows, G rows of a graph, V vocabulary.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch

from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.running.prefix_sharing import PrefixSharing
from tandem.engine.scheduling.step import ScheduledRow, SchedulerOutput, rows_follow
from tandem.kernels.products import few_rows_attention
from tandem.kernels.products.few_rows_scratch import MOST_ROWS
from tandem.kernels.products.fused_ops import argmax_tokens

# Up to so many tokens the host takes longer to launch a step than the device to run it;
# docs/measurements.md#steps-of-few-rows.
REPLAYED_TOKENS = 512
# Keys that the rows of chunks may read in all, in tokens: each row reads all before it, where a prefill kernel reads it
# once for many. So many take about as long as launching a step kernel by kernel.
MAX_CHUNK_READS = 1 << 17  # a guess from docs/measurements.md#steps-of-few-rows
StepKind = Literal["plain", "shared", "adapted", "following"]


def graph_sizes(max_rows: int) -> list[int]:
    """Rows of the captured graphs: dense where a padded row costs most of a step, coarser above."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [*(size for size in ladder if size < max_rows), max_rows]


def shared_graph_sizes(max_rows: int) -> list[int]:
    """Rows of the graphs for batches that share prefixes."""
    ladder = [8, 16, 32, 48, *range(64, 256, 32), *range(256, max_rows, 128)]
    return [*(size for size in ladder if size < max_rows), max_rows]


@contextmanager
def without_garbage() -> Iterator[None]:
    """Collects garbage now and none within its `with` block. A collection in the middle of a capture would end it: it
    may free page-locked memory or old graphs, which is forbidden there. torch no longer collects before it captures."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def rows_needed(output: SchedulerOutput) -> int:
    """The rows of the smallest plain graph that may run this step."""
    return _least_size(output.num_tokens, output.has_drafts or not output.is_decode)


def _least_size(num_rows: int, rows_follow: bool) -> int:
    """Plain graphs of few rows may take the whole of attention in one launch, in which no row sees what another stores:
    tokens of one sequence need a larger one."""
    return max(num_rows, MOST_ROWS + 1) if rows_follow else num_rows


def _follow(rows: Sequence[ScheduledRow]) -> bool:
    """Whether several of these rows, of one token each, are one sequence's; not looked for in more rows than matter."""
    return len(rows) <= MOST_ROWS and rows_follow(rows)


class DecodeGraphs:
    """The graphs of one runner: `run` replays the one that fits; `capture` must come first, once the KV pool is
    bound."""

    def __init__(
        self,
        batch: DecodeBatch,
        sharing: PrefixSharing | None = None,
        with_adapters: bool = False,
        group: ExpertGroup | None = None,
    ) -> None:
        """`batch`: what the graphs run; the largest has all of its rows. `group`: whose nodes agree on the size of each
        step."""
        self.batch = batch
        self.sizes = graph_sizes(batch.max_rows)
        self.sizes_of: dict[StepKind, list[int]] = {"plain": self.sizes}
        if sharing is not None:
            self.sizes_of["shared"] = shared_graph_sizes(batch.max_rows)
        if with_adapters:  # a group agrees on sizes of plain graphs
            self.sizes_of["adapted"] = self.sizes if group is not None else shared_graph_sizes(batch.max_rows)
        if group is None and few_rows_attention.has_kernel(batch.device):
            self.sizes_of["following"] = [size for size in self.sizes if 1 < size <= MOST_ROWS]
        self._group = group
        self._sharing = sharing
        self._members = 1 if sharing is None else sharing.members
        self._graphs: dict[tuple[int, StepKind], torch.cuda.CUDAGraph] = {}
        self._logits_GV: torch.Tensor | None = None

    @property
    def num_graphs(self) -> int:
        return sum(map(len, self.sizes_of.values()))

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures all graphs, the largest first, so that smaller ones find their memory in the shared pool. Their rows
        are padding: no KV is written."""
        stream = torch.cuda.Stream(self.batch.device)  # torch's own would be that of the process's first capture
        pool = None
        with without_garbage():
            for kind, sizes in self.sizes_of.items():
                for size in reversed(sizes):
                    pool = self._capture(size, kind, pool, stream)
        if self._group is not None:
            self._group.replay(self.sizes)

    def _capture(self, size: int, kind: StepKind, pool: Any, stream: torch.cuda.Stream) -> Any:
        """Captures one graph in the memory pool (None: a new one) -> the pool."""
        prefixes = self._sharing.nothing(size) if kind == "shared" and self._sharing is not None else None
        how = kind == "adapted", kind == "following"
        self.batch.fill((), size, kind == "adapted")
        logits = self.batch.forward(size, prefixes, None, *how)  # compiles kernels, makes constants: not under capture
        if self._logits_GV is None:
            self._logits_GV = torch.empty_like(logits)  # one for all graphs, the largest comes first
        self.batch.store(argmax_tokens(logits))
        self.batch.store_most_likely(logits)
        torch.cuda.synchronize(self.batch.device)
        graph = torch.cuda.CUDAGraph()
        # What other threads do (a transfer, another node of this process) must not end the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.batch.forward(size, prefixes, self._logits_GV[:size], *how)
        self._graphs[size, kind] = graph
        return graph.pool()

    def takes(self, rows: Sequence[ScheduledRow]) -> bool:
        """Whether these rows, each token as a row of its own, are a graph's work rather than a prefill kernel's."""
        if not self.fit_group:
            return False
        num_tokens = sum(row.num_tokens for row in rows)
        follow = "following" not in self.sizes_of and (num_tokens > len(rows) or _follow(rows))
        if _least_size(num_tokens, follow) > self.sizes[-1]:
            return False
        # What guesses read is read by decodes, too.
        return num_tokens == len(rows) or sum(map(self._reads, rows)) <= MAX_CHUNK_READS

    @property
    def fit_group(self) -> bool:
        """Whether there is a graph of the size that the nodes of a group have agreed on; so if they haven't."""
        return self._agreed is None or self._agreed in self.sizes

    @property
    def _agreed(self) -> int | None:
        return None if self._group is None else self._group.capacity

    def graph_for(self, rows: Sequence[ScheduledRow]) -> tuple[int, StepKind]:
        """The graph that runs rows of one token each. Of few rows a plain or adapted one may take the whole of
        attention in one launch, in which no row sees what another stores."""
        follow, kind = _follow(rows), self._kind_for(rows)
        if follow and kind == "plain" and "following" in self.sizes_of:
            kind = "following"
        if self._agreed is not None:
            # Rows of a size that nodes agreed on whose rows don't share read what they share alone.
            return self._agreed, kind if self._agreed in self.sizes_of[kind] else "plain"
        least = _least_size(len(rows), follow and kind in ("plain", "adapted"))
        sizes = self.sizes_of[kind]
        return sizes[bisect.bisect_left(sizes, least)], kind

    def _kind_for(self, rows: Sequence[ScheduledRow]) -> StepKind:
        """The kind that the rows need by what they take, not by whose they are."""
        if "adapted" in self.sizes_of and self.batch.adapters_of(rows).any():
            return "adapted"
        if self._sharing is not None and self._sharing.of_rows(rows) is not None:
            return "shared"  # of_rows has put the prefixes where the graphs look for them
        return "plain"

    def _reads(self, row: ScheduledRow) -> int:
        """Tokens whose keys a chunk's rows read; what lies before the chunk they may read together."""
        if row.num_tokens == 1:
            return 0
        return row.start * -(-row.num_tokens // self._members) + row.num_tokens**2 // 2

    def run_dummy(self, num_rows: int) -> torch.Tensor:
        """Logits of padding rows: a step that stores nothing."""
        return self.run([ScheduledRow(-1, 0, 1)] * num_rows)

    def run(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        """Logits [R, V] of one token a row, in the graphs' memory: valid until the next run on this stream."""
        assert self._logits_GV is not None, "capture comes first"
        size, kind = self.graph_for(rows)
        self.batch.fill(rows, size, kind == "adapted")
        self._graphs[size, kind].replay()
        return self._logits_GV[: len(rows)]
