"""Steps whose rows are a token each, as graphs run them: buffers that stay where they are, and the pass over them.

The host says which slots are in a step and where each of them is; everything else is read on the device.

Shape legend: R rows, G rows of a graph, S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from tandem.engine.running.batch_state import BatchState
from tandem.engine.running.encoder_spans import CrossInputs, EncoderSpans
from tandem.engine.running.graphs.step_words import LINKS, POSITION, SLOT, StepWords
from tandem.engine.running.heads.features import HeadFeatures
from tandem.engine.scheduling.step import ScheduledRow
from tandem.kernels.api.attention import Attention, metadata_backend
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.prefixes.shared_prefix import SharedPrefixes
from tandem.kernels.products.adapter_rows import AdapterRows, sorted_rows
from tandem.kernels.products.rotary_attention import WantedTokens
from tandem.kernels.sampling.decode_buffers import DecodeInputs
from tandem.kernels.sampling.decode_inputs import gather_decode_inputs, store_most_likely, store_tokens

# Steps whose tokens lie apart on the host. An engine reads one step before it launches the second behind it, so three
# would do.
UNREAD_STEPS = 4
ROW_MULTIPLE = 16  # keeps every buffer aligned as kernels like it; a guess


class DecoderLike(Protocol):
    """What such steps need of a model: T token ids to hidden states (T, hidden size), and those to logits (T, V)."""

    @property
    def attention_layers(self) -> Mapping[str, Attention]: ...

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, wanted: WantedTokens | None = None
    ) -> torch.Tensor: ...

    def project(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor: ...


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
        """`shift_S`: by how much a slot's positions are beyond its tokens' places; None: in none. `table_of`: each
        layer's block table, where there are several."""
        self._model = model
        self._features = features
        self._table_of = dict(table_of or {})
        self._shift_S = shift_S
        self._spans = spans
        self._state = state
        self._max_model_len = max_model_len
        self.max_rows = max_rows
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
        `with_adapters`. `rows_follow`: of few rows some may be one sequence's; of more (few_rows_scratch.MOST_ROWS)
        always."""
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
