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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import numpy as np
import torch

from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.encoder_spans import CrossInputs, EncoderSpans
from tandem.engine.running.graphs.step_words import LINKS, POSITION, SLOT, StepWords
from tandem.engine.running.heads.features import HeadFeatures
from tandem.engine.running.prefix_sharing import PrefixSharing
from tandem.engine.scheduling.step import ScheduledRow, SchedulerOutput, rows_follow
from tandem.kernels.api.attention import Attention, metadata_backend
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.prefixes.shared_prefix import SharedPrefixes
from tandem.kernels.products import few_rows_attention
from tandem.kernels.products.adapter_rows import AdapterRows, sorted_rows
from tandem.kernels.products.few_rows_scratch import MOST_ROWS
from tandem.kernels.products.fused_ops import argmax_tokens
from tandem.kernels.products.rotary_attention import WantedTokens
from tandem.kernels.sampling.decode_buffers import DecodeInputs
from tandem.kernels.sampling.decode_inputs import gather_decode_inputs, store_most_likely, store_tokens

# Steps whose tokens lie apart on the host. An engine reads one step before it launches the second behind it, so three
# would do.
UNREAD_STEPS = 4
ROW_MULTIPLE = 16  # keeps every buffer aligned as kernels like it; a guess
# Up to so many tokens the host takes longer to launch a step than the device to run it;
# docs/measurements.md#steps-of-few-rows.
REPLAYED_TOKENS = 512
# Keys that the rows of chunks may read in all, in tokens: each row reads all before it, where a prefill kernel reads it
# once for many. So many take about as long as launching a step kernel by kernel.
MAX_CHUNK_READS = 1 << 17  # a guess from docs/measurements.md#steps-of-few-rows
StepKind = Literal["plain", "shared", "adapted", "following"]


class DecoderLike(Protocol):
    """What graphs need of a model: T token ids to hidden states (T, hidden size), and those to logits (T, V)."""

    @property
    def attention_layers(self) -> Mapping[str, Attention]: ...

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: WantedTokens | None = None
    ) -> torch.Tensor: ...

    def project(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


def graph_sizes(max_rows: int) -> list[int]:
    """Rows of the captured graphs: dense where a padded row costs most of a step, coarser above."""
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_rows, 64)]
    return [*(size for size in ladder if size < max_rows), max_rows]


def shared_graph_sizes(max_rows: int) -> list[int]:
    """Rows of the graphs for batches that share prefixes."""
    ladder = [8, 16, 32, 48, *range(64, 256, 32), *range(256, max_rows, 128)]
    return [*(size for size in ladder if size < max_rows), max_rows]


def metadata_of_rows(
    layers: Mapping[str, Attention],
    inputs: DecodeInputs,
    starts: torch.Tensor,
    max_model_len: int,
    seq_lens_cpu: tuple[int, ...],
    **more: Any,
) -> AttentionMetadata:
    """Says how G rows of a token each attend, whose lengths are on the device. `starts`: 0, 1, ... int32, at least
    G + 1; `seq_lens_cpu`: what the host takes for them; `more`: of the metadata's fields."""
    size = len(inputs.seq_lens_R)
    return metadata_backend(layers.values()).get_metadata_cls()(
        query_start_loc=starts[: size + 1],
        seq_lens=inputs.seq_lens_R,
        block_tables=inputs.block_tables_RB,
        slot_mapping=inputs.slot_mapping_R,
        num_decode_rows=size,
        max_query_len=1,
        max_seq_len=max_model_len,
        query_lens_cpu=(1,) * size,
        seq_lens_cpu=seq_lens_cpu,
        **more,
    )


class DecodeBatch:
    """The input buffers of decode steps, and the forward pass over them."""

    def __init__(
        self,
        model: DecoderLike,
        state: BatchState,
        max_rows: int,
        max_model_len: int,
        shift_S: torch.Tensor | None = None,
        spans: EncoderSpans | None = None,
        features: HeadFeatures | None = None,
        table_of: Mapping[str, int] | None = None,
    ) -> None:
        self._model = model
        self._features = features
        self._table_of = dict(table_of or {})
        self._shift_S = shift_S
        self._spans = spans
        self._state = state
        self._max_model_len = max_model_len
        rows = -(-max_rows // ROW_MULTIPLE) * ROW_MULTIPLE
        self._words = StepWords(state.device, None if features is None else features.links)
        self._adapted = torch.zeros((2, rows), dtype=torch.int32, device=state.device)  # order, slots
        self._inputs = [DecodeInputs.allocate(rows, state.max_blocks, state.device) for _ in state.tables_SB]
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=state.device)
        self.device = state.device
        self._pinned = state.device.type == "cuda"
        self._tokens = torch.zeros((UNREAD_STEPS, rows), dtype=torch.int64, pin_memory=self._pinned)  # on the host
        self._turn = 0

    def fill(self, rows: Sequence[ScheduledRow], size: int, with_adapters: bool = False) -> None:
        """Writes the step's slots and the position of each one's newest token, and which adapter each takes if some
        do, with copies that don't wait."""
        self._words.fill(rows, size)
        if with_adapters:
            adapter_G = np.zeros(size, np.int32)
            adapter_G[: len(rows)] = self.adapters_of(rows)
            sent = torch.from_numpy(sorted_rows(adapter_G))
            self._adapted[:, :size].copy_(sent.pin_memory() if self._pinned else sent, non_blocking=True)

    def adapters_of(self, rows: Sequence[ScheduledRow]) -> np.ndarray:
        """int32 [R]: the slot of each row's adapter, 0 for none."""
        slots = [row.slot for row in rows]
        adapters: np.ndarray = np.where(np.array(slots, np.int64) < 0, 0, self._state.settings["adapter"][slots])
        return adapters

    def forward(
        self,
        size: int,
        prefixes: SharedPrefixes | None = None,
        out_GV: torch.Tensor | None = None,
        with_adapters: bool = False,
        rows_follow: bool = False,
    ) -> torch.Tensor:
        """Logits [size, V] in the model's dtype, for what `fill` put there. Rows take their adapters only
        `with_adapters`. `rows_follow`: of few rows some may be one sequence's; of more than MOST_ROWS always."""
        adapters = None
        if with_adapters:
            adapters = AdapterRows(self._adapted[0, :size], self._adapted[1, :size])
        words = self._words.buffer(size)[:, :size]
        slot_G, position_G = words[SLOT], words[POSITION]
        state, every = self._state, [each.first(size) for each in self._inputs]
        for table_SB, inputs in zip(state.tables_SB, every, strict=True):
            gather_decode_inputs(slot_G, position_G, state.token_ids_SC, table_SB, state.block_size, inputs)
        cross = None if self._spans is None else self._spans.of_slots(slot_G)
        by_table = [
            self._metadata(inputs, size, cross, None if place else prefixes, rows_follow)
            for place, inputs in enumerate(every)
        ]
        by_layer = {name: by_table[table] for name, table in self._table_of.items()}
        if self._shift_S is not None:
            position_G = position_G + self._shift_S[slot_G]  # padding takes the last slot's: any will do
        layers = self._model.attention_layers
        with set_forward_context(ForwardContext(by_layer or by_table[0], layers, adapters=adapters)):
            hidden_GH = self._model(every[0].input_ids_R, position_G)
            if self._features is not None:
                self._features.note(every[0].input_ids_R, position_G, words[LINKS:])
        return self._model.project(hidden_GH, out_GV)

    def _metadata(
        self,
        inputs: DecodeInputs,
        size: int,
        cross: CrossInputs | None,
        prefixes: SharedPrefixes | None,
        rows_follow: bool,
    ) -> AttentionMetadata:
        return metadata_of_rows(
            self._model.attention_layers,
            inputs,
            self._starts,
            self._max_model_len,
            (self._max_model_len,) * size,
            encoder_seq_lens=None if cross is None else cross.lengths_on_device,
            encoder_seq_lens_cpu=() if cross is None else cross.lengths,
            cross_block_tables=None if cross is None else cross.block_tables,
            shared_prefixes=prefixes,
            rows_follow=rows_follow,
        )

    def store(self, token_R: torch.Tensor) -> None:
        """Writes the sampled tokens (one per row, in the order of `fill`) into the slots' tables."""
        store_tokens(*self._words.newest(len(token_R)), token_R, self._state.token_ids_SC)

    def store_most_likely(self, logits_RV: torch.Tensor) -> torch.Tensor:
        """Does the same with each row's most likely token, and has the next step of these rows begin behind it. Returns
        the tokens int64 [R] on the host, there when all that was launched has run, and until UNREAD_STEPS more steps
        have been drawn."""
        num_rows = len(logits_RV)
        self._turn = (self._turn + 1) % UNREAD_STEPS
        token_R = self._tokens[self._turn, :num_rows]

        def launch(slot_R: torch.Tensor, position_R: torch.Tensor) -> None:
            store_most_likely(logits_RV, slot_R, position_R, self._state.token_ids_SC, token_R)

        self._words.advance(num_rows, launch)
        return token_R


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
        model: DecoderLike,
        state: BatchState,
        max_rows: int,
        max_model_len: int,
        sharing: PrefixSharing | None = None,
        shift_S: torch.Tensor | None = None,
        with_adapters: bool = False,
        spans: EncoderSpans | None = None,
        features: HeadFeatures | None = None,
        table_of: Mapping[str, int] | None = None,
        group: ExpertGroup | None = None,
    ) -> None:
        """`shift_S`: by how much a slot's positions are beyond its tokens' places; None: in none. `table_of`: each
        layer's block table, where there are several. `group`: whose nodes agree on the size of each step."""
        self.batch = DecodeBatch(model, state, max_rows, max_model_len, shift_S, spans, features, table_of)
        self.sizes = graph_sizes(max_rows)
        self.sizes_of: dict[StepKind, list[int]] = {"plain": self.sizes}
        if sharing is not None:
            self.sizes_of["shared"] = shared_graph_sizes(max_rows)
        if with_adapters:  # a group agrees on sizes of plain graphs
            self.sizes_of["adapted"] = self.sizes if group is not None else shared_graph_sizes(max_rows)
        if group is None and few_rows_attention.has_kernel(state.device):
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
