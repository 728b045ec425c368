"""Attention of steps with prompts inside captured graphs, by our Triton kernels: lengths are read on the device.

A graph has room for rows of one token, which come first, and for pieces of prompts. What a step's lengths say stands in
buffers that `fill` writes before the graphs are replayed: the rows' lengths and block tables, how decode spreads its
work over them, and the pieces that the Hopper kernel computes. What is left of the room is empty: rows of no tokens,
whose zeros the pieces' results replace, and pieces of no queries, which write nothing.

Shape legend: G tokens of a graph, H query heads, K KV heads, D head size, R rows of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tandem.kernels.api.backend import BoundLayer, PagedKV, Prefill
from tandem.kernels.api.metadata import AttentionMetadata, RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.triton_prefill import why_general
from tandem.kernels.blocks.quantization import scale_tensor
from tandem.kernels.triton_kernels.decode.decode_launch import decode_constants, paged_decode, plan_decode
from tandem.kernels.triton_kernels.decode.decode_plan import DecodePlan
from tandem.kernels.triton_kernels.prefill.prefill_launch import (
    FIELDS,
    FIRST_TOKEN,
    QUERIES,
    ROW,
    launch_prefill,
    list_work,
)

MOST_ROWS = 256  # of one token; with more a step takes the device so long that its launch is hidden; a guess
MOST_PROMPTS = 16  # in one step; a guess
# Of a layer, above which a step is launched that reads once what rows share: launching a layer takes the host 0.8 ms
# longer than its graph (docs/measurements.md#prompts-as-graphs), in which the device reads so much.
MOST_READ_AGAIN = 3_000_000_000


class TritonCapturedAttention:
    """The buffers of one model's captured attention. Implements CapturedAttention of kernels/api/backend.py."""

    def __init__(self, layers: Sequence[BoundLayer], most_rows: int, max_tokens: int, max_model_len: int) -> None:
        """`most_rows` of one token (MOST_ROWS at most), `max_tokens` of a graph. The layers' caches are bound."""
        cache = layers[0].kv_cache[0]
        device, block_size = cache.device, cache.shape[3]
        self.most_rows = most_rows = min(most_rows, max_tokens, MOST_ROWS)
        self._first_piece = -(-most_rows // FIELDS) * FIELDS  # kernels are compiled for aligned pieces
        num_words = self._first_piece + self._num_pieces(max_tokens) * FIELDS
        self._words = torch.zeros(num_words, dtype=torch.int32, device=device)
        self._seq_lens_R, self._pieces = self._words[:most_rows], self._words[self._first_piece :].view(-1, FIELDS)
        num_blocks = -(-max_model_len // block_size)
        tables = torch.zeros((most_rows + MOST_PROMPTS, num_blocks), dtype=torch.int32, device=device)
        self._block_tables = tables
        self._rows = RowBatch(
            query_start_loc=torch.arange(most_rows + 1, dtype=torch.int32, device=device),
            seq_lens=self._seq_lens_R, block_tables=tables[:most_rows], query_lens_cpu=(1,) * most_rows,
            seq_lens_cpu=(max_model_len,) * most_rows, max_query_len=1, max_seq_len=max_model_len,
        )  # fmt: skip
        self._plans: dict[tuple[object, ...], tuple[DecodePlan, AttentionSpec, int]] = {}
        for layer in layers:
            self._plan_of(layer)

    @staticmethod
    def _num_pieces(num_tokens: int) -> int:
        """At most so many pieces have the prompts of a graph of so many tokens."""
        return -(-num_tokens // QUERIES) + MOST_PROMPTS

    def takes(self, metadata: AttentionMetadata) -> bool:
        """Whether there is room for these rows, and they share little: it is read for each of them here."""
        num_prompts = metadata.num_rows - metadata.num_decode_rows
        has_room = metadata.num_decode_rows <= self.most_rows and num_prompts <= MOST_PROMPTS
        shared = metadata.shared_prefixes
        return has_room and (shared is None or shared.saved_bytes <= MOST_READ_AGAIN)

    def fill(self, metadata: AttentionMetadata) -> None:
        """Says what the next replays attend to: in one copy, and a launch for each kind of layer."""
        num_rows = metadata.num_decode_rows
        host = torch.zeros(len(self._words), dtype=torch.int32, pin_memory=self._words.is_cuda)
        words = host.numpy()
        words[:num_rows] = metadata.seq_lens_cpu[:num_rows]
        pieces = list_work(metadata.query_lens_cpu[num_rows:], metadata.seq_lens_cpu[num_rows:])
        pieces[:, ROW] += num_rows
        pieces[:, FIRST_TOKEN] += num_rows  # each row before them has one
        words[self._first_piece :].reshape(-1, FIELDS)[: len(pieces)] = pieces
        self._words.copy_(host, non_blocking=True)
        self._block_tables[: metadata.num_rows].copy_(metadata.block_tables)
        for plan, spec, tile in self._plans.values():
            plan.fill(self._seq_lens_R, spec.num_kv_heads, tile, reach=spec.reach)

    def begin(self) -> None:
        """Begins the layers of one graph."""
        for plan, _, _ in self._plans.values():
            plan.expect_fill()

    def attend(
        self,
        layer: BoundLayer,
        query_GHD: torch.Tensor,
        key_GKD: torch.Tensor,
        value_GKD: torch.Tensor,
        meta: AttentionMetadata,
        kv_is_stored: bool,
    ) -> torch.Tensor:
        """[G, H, D]. Raises ValueError where tensors lie as the Hopper kernel can't read them."""
        kv, spec, device = PagedKV.of_layer(layer.kv_cache[0]), layer.spec, query_GHD.device
        if (reason := why_general(Prefill(query_GHD, key_GKD, value_GKD, kv, self._rows), spec)) is not None:
            raise ValueError(f"attention can't be captured: {reason}")
        caches, one = (kv.key_cache, kv.value_cache), scale_tensor(1.0, device)
        options: dict[str, Any] = {
            "alibi_slopes": spec.slopes_on(device), "sinks": spec.sinks_on(device), "reach": spec.reach,
            "soft_cap": spec.logits_soft_cap,
        }  # fmt: skip
        out_GHD = torch.empty(query_GHD.shape, dtype=query_GHD.dtype, device=device)
        with torch.cuda.device_of(query_GHD):
            if not kv_is_stored:
                layer.impl.store(key_GKD, value_GKD, kv, meta)
            plan, constants = self._plan_of(layer)
            out_GHD[: self.most_rows] = paged_decode(
                query_GHD[: self.most_rows], *caches, self._rows.block_tables, self._seq_lens_R, spec.scale, constants,
                plan=plan, k_scale=one, v_scale=one, **options,
            )  # fmt: skip
            pieces = self._pieces[: self._num_pieces(len(query_GHD))]
            launch_prefill(
                query_GHD, key_GKD, value_GKD, *caches, self._block_tables, pieces, spec.scale, out=out_GHD, **options
            )
        return out_GHD

    def _plan_of(self, layer: BoundLayer) -> tuple[DecodePlan, dict[str, int]]:
        """How decode spreads its work in such a layer, and its constants: of rows of one token."""
        cache, spec = layer.kv_cache[0], layer.spec
        constants = decode_constants(
            cache.dtype, cache.element_size(), spec.group_size, 1, spec.head_size, cache.shape[3], 0
        )
        key = (id(constants), spec.num_kv_heads, spec.reach)
        if key not in self._plans:
            plan = plan_decode(self._seq_lens_R, spec.num_kv_heads, constants, reach=spec.reach)
            self._plans[key] = plan, spec, constants["TILE"]
        return self._plans[key][0], constants
