"""Batches over a cache of latents, and what attention to them must give: every head with its own keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tandem.kernels.api.attention import Attention
from tandem.kernels.api.backend import PagedKV
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.latent_attention import latent_attention, latent_store
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder, RowBatch, slots_of
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.latents.new_rows import NewLatents
from tandem.kernels.reference.latents import finished_rows, rotated_queries


@dataclass
class Case:
    """Rows of a batch, whose latents are in `cache` but for those of the new tokens (`row_TR`). Slots of nobody are
    NaN in a cache that only decode reads."""

    query_THD: torch.Tensor
    row_TR: torch.Tensor
    weight_OL: torch.Tensor
    cache: torch.Tensor  # [num_blocks, 1, 1, S, L + P], a layer of a pool
    metadata: AttentionMetadata
    rows: list[torch.Tensor]  # every token of each sequence
    scale: float
    new: NewLatents  # the new tokens before they are normalised and rotated to `query_THD` and `row_TR`

    @property
    def latent_size(self) -> int:
        return self.weight_OL.shape[1]

    def decode(self) -> tuple[torch.Tensor, PagedKV, RowBatch, AttentionSpec]:
        """The same as decode rows of absorbed queries, their own latents stored."""
        self.store()
        heads, width = self.query_THD.shape[1], self.row_TR.shape[1]
        spec = AttentionSpec(heads, width, self.scale, 1, latent_size=self.latent_size)
        generator = torch.Generator().manual_seed(1)
        query = torch.randn(len(self.rows), heads, width, generator=generator).to(self.row_TR)
        return query, PagedKV.of_layer(self.cache), self.metadata.decode_rows(), spec

    def store(self) -> None:
        size = self.cache.shape[3]
        slots = self.metadata.slot_mapping
        self.cache[slots // size, 0, 0, slots % size] = self.row_TR

    def row_of(self, row: int, length: int) -> torch.Tensor:
        return self.rows[row][:length]

    def run(self, layer: Attention) -> torch.Tensor:
        layer.bind(self.cache)
        with set_forward_context(ForwardContext(self.metadata, {"l": layer})):
            return latent_attention(self.new, self.weight_OL, "l")

    def run_store(self, layer: Attention) -> None:
        """Has the new rows stored, and nobody attend."""
        layer.bind(self.cache)
        nothing = replace(self.new, query_THD=self.new.query_THD[:, :0])
        with set_forward_context(ForwardContext(self.metadata, {"l": layer})):
            latent_store(nothing, "l")

    def without_first(self) -> Case:
        """The same rows where nobody sees their first tokens."""
        return replace(self, rows=[row[1:] for row in self.rows])


def made_case(
    query_lens: Sequence[int], seq_lens: Sequence[int], heads: int, latent: int, rotated: int, block: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu", key_width: int = 16, value_width: int = 12,
    unused: float = 0.0, interleaved: bool = True,
) -> Case:  # fmt: skip
    """Rows with one new token first. `unused`: what lies in slots that nobody uses."""
    generator = torch.Generator().manual_seed(3)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    counts = [-(-length // block) for length in seq_lens]
    ids = torch.randperm(sum(counts) + 2, generator=generator).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    new_tokens = new_latents(query_lens, seq_lens, heads, latent, rotated, key_width, numbers, interleaved=interleaved)
    query, made = finished(new_tokens)
    pool = torch.full((sum(counts) + 2, 1, 3, 1, block, latent + rotated), unused, dtype=dtype, device=device)
    cache, rows, slots = pool[:, :, 1], [], []
    for table, length, fresh, own in zip(tables, seq_lens, query_lens, made.split(list(query_lens)), strict=True):
        row = torch.cat((numbers(length - fresh, latent + rotated), own))
        earlier = torch.from_numpy(slots_of(table, 0, length - fresh, block)).to(device)
        cache[earlier // block, 0, 0, earlier % block] = row[: length - fresh]
        rows.append(row)
        slots += slots_of(table, length - fresh, fresh, block).tolist()
    metadata = AttentionMetadataBuilder().build(query_lens, seq_lens, tables, slots, device)
    weight = numbers(heads * (key_width + value_width), latent) / latent**0.5
    return Case(query, made, weight, cache, metadata, rows, (key_width + rotated) ** -0.5, new_tokens)


def new_latents(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    heads: int,
    latent: int,
    rotated: int,
    key_width: int,
    numbers: Callable[..., torch.Tensor],
    *,
    interleaved: bool,
) -> NewLatents:
    """Views of one merged matrix, as a layer's first product makes it."""
    width = heads * (key_width + rotated)
    merged = numbers(sum(query_lens), width + latent + rotated)
    positions = [torch.arange(length - new, length) for new, length in zip(query_lens, seq_lens, strict=True)]
    angles = torch.arange(max(seq_lens))[:, None] / 100 ** (torch.arange(rotated // 2) / rotated)
    wide = torch.promote_types(merged.dtype, torch.float32)
    table = torch.cat((angles.cos(), angles.sin()), dim=1).to(merged.device, wide)
    gain = 1 + numbers(latent) / 8
    query = merged[:, :width].view(-1, heads, key_width + rotated)
    position = torch.cat(positions).to(merged.device)
    return NewLatents(query, merged[:, width:], gain, 1e-6, position, table, interleaved)


def finished(new: NewLatents) -> tuple[torch.Tensor, torch.Tensor]:
    """Its queries and rows, by the twins."""
    turning = new.position_T, new.cos_sin_CP, new.interleaved
    return rotated_queries(new.query_THD, *turning), finished_rows(new.row_TR, new.gain_L, new.eps, *turning)


def expected_rows(case: Case) -> torch.Tensor:
    """[T, H, V] in float64."""
    heads, latent = case.query_THD.shape[1], case.latent_size
    rotated = case.row_TR.shape[1] - latent
    key_width = case.query_THD.shape[2] - rotated
    weight = case.weight_OL.double().view(heads, -1, latent)
    made, start = [], 0
    for row, length in zip(case.rows, case.metadata.query_lens_cpu, strict=True):
        tokens, wide = row.double(), case.query_THD[start : start + length].double()
        start += length
        both = torch.einsum("sl,hol->sho", tokens[:, :latent], weight)
        shared = tokens[:, None, latent:].expand(-1, heads, -1)
        keys = torch.cat((both[..., :key_width], shared), -1)
        scores = torch.einsum("thd,shd->hts", wide, keys) * case.scale
        hidden = torch.ones(length, len(row), dtype=torch.bool, device=row.device).triu(len(row) - length + 1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        made.append(torch.einsum("hts,shv->thv", weights, both[..., key_width:]))
    return torch.cat(made)
