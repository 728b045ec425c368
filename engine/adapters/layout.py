"""Where an adapter's matrices lie in its slot.

A slot is one run of elements of the model's dtype: for each projection that the decoder computes as one product, the A
of each of its parts [P * R, inputs], then B [outputs, R]. So one copy fills a slot, and all slots together are one
stack for each projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.engine.contracts.model_config import ModelConfig
from tandem.kernels.products.adapter_rows import padded_rank

MOST_PARTS = 3  # of a merged product: q, k and v


@dataclass(frozen=True)
class Projection:
    """One merged projection of one layer, as this rank computes it. `parts`: the modules of the checkpoint that are
    merged into it, `part_sizes` their outputs; offsets are in elements of the slot."""

    name: str  # of the decoder's module
    parts: tuple[str, ...]
    part_sizes: tuple[int, ...]
    num_inputs: int
    a_start: int
    b_start: int
    end: int


@dataclass(frozen=True)
class AdapterLayout:
    """The projections of a decoder in order. `rank` is R; every adapter's is at most `max_rank`."""

    projections: tuple[Projection, ...]
    max_rank: int
    rank: int

    @property
    def num_elements(self) -> int:
        return self.projections[-1].end

    @classmethod
    def of(cls, own: ModelConfig, max_rank: int) -> AdapterLayout:
        """The layout of adapters of at most `max_rank`; `own` is what this rank computes of the model."""
        rank, start = padded_rank(max_rank), 0
        projections = []
        for name, parts, sizes, inputs in _projections(own):
            b_start = start + len(parts) * rank * inputs
            end = b_start + sum(sizes) * rank
            projections.append(Projection(name, parts, sizes, inputs, start, b_start, end))
            start = end
        return cls(tuple(projections), max_rank, rank)


def _projections(own: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], tuple[int, ...], int]]:
    """Yields (module, modules of the checkpoint, their outputs, inputs)."""
    queries, kv = own.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    hidden, inner = own.hidden_size, own.intermediate_size
    for layer in range(own.num_layers):
        for block, merged, names, sizes, inputs in (
            ("self_attn", "qkv_proj", ("q_proj", "k_proj", "v_proj"), (queries, kv, kv), hidden),
            ("self_attn", "o_proj", ("o_proj",), (hidden,), queries),
            ("mlp", "gate_up_proj", ("gate_proj", "up_proj"), (inner, inner), hidden),
            ("mlp", "down_proj", ("down_proj",), (hidden,), inner),
        ):
            place = f"layers.{layer}.{block}"
            yield f"{place}.{merged}", tuple(f"model.{place}.{name}" for name in names), sizes, inputs
