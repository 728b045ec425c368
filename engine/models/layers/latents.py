"""Self-attention whose heads' keys and values are made of one latent a token, as in DeepSeek-V2 and V3
(docs/latent_attention.md).

T tokens of the step, R of a step of few rows, E hidden size, H heads of this rank, D a head's query width.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.contracts.model_config import LatentConfig, ModelConfig
from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.latent_attention import latent_attention, latent_store
from tandem.kernels.latents.new_rows import NewLatents
from tandem.kernels.products import few_rows
from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.products.quantised import RoundedRows
from tandem.kernels.products.rotary_attention import WantedTokens

EPS = 1e-6  # of the latents' norms, whatever the layers' is: what transformers has


def first_product(latents: LatentConfig) -> str:
    """The name of a layer's first product, which is of both: queries, or the latent that makes them, and the latent of
    keys and values."""
    return "q_kv_a_proj" if latents.query_size is None else "q_a_kv_a_proj"


class LatentSelfAttention(nn.Module):
    """One layer's attention with its projections. The heads are this rank's; latents are whole on every rank."""

    def __init__(self, config: ModelConfig, layer: int, backend: str, *, hides_first: bool = False) -> None:
        super().__init__()
        assert config.latents is not None, "its heads have keys and values of their own"
        latents, hidden = config.latents, config.hidden_size
        self.layer_name = f"model.layers.{layer}.self_attn"
        self.latents, self.num_heads = latents, config.num_heads
        queries = config.num_heads * latents.query_width
        self._query_size = latents.query_size or queries  # outputs of the first product before the latent's
        self._first = first_product(latents)
        self.add_module(self._first, Linear(hidden, self._query_size + latents.size + latents.rotated, bias=False))
        self.q_a_layernorm = None if latents.query_size is None else RMSNorm(latents.query_size, EPS)
        self.q_b_proj = None if latents.query_size is None else Linear(latents.query_size, queries, bias=False)
        self.kv_a_layernorm = RMSNorm(latents.size, EPS)
        self.kv_b_proj = Linear(latents.size, config.num_heads * (latents.key_width + latents.value_width), bias=False)
        self.o_proj = Linear(config.attended_size, hidden, bias=False)
        self.attention = Attention(
            config.num_heads,
            config.head_dim,
            config.scale,
            1,
            attn_backend=None if backend == "auto" else backend,
            layer_name=self.layer_name,
            latent_size=latents.size,
            hides_first=hides_first,
        )

    @property
    def first(self) -> Linear:
        """What takes in hidden states."""
        product = self.get_submodule(self._first)
        assert isinstance(product, Linear)
        return product

    def finish_loading(self, dtype: torch.dtype) -> None:
        """Attention multiplies queries with what expands latents, which no product of quantised weights does."""
        self.kv_b_proj.make_plain(dtype)

    def forward(
        self,
        x_TE: torch.Tensor | RoundedRows,
        positions_T: torch.Tensor,
        cos_sin: torch.Tensor,
        stream_TE: torch.Tensor | None = None,
    ) -> torch.Tensor | UnaddedProduct | None:
        """Attention's output [T, E]; None where it has been added to the stream on the way."""
        return self.o_proj.product_onto(stream_TE, self._attended(self.first(x_TE), positions_T, cos_sin))

    def forward_few_rows(
        self, residual_RE: torch.Tensor, norm: RMSNorm, positions_R: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        """residual += attention of the normalised residual, the norm and the addition within products."""
        first_RC = few_rows.norm_linear(residual_RE, norm.weight, norm.eps, self.first.weight)
        few_rows.add_linear(residual_RE, self._attended(first_RC, positions_R, cos_sin), self.o_proj.weight)

    def forward_wanted(
        self, x_TE: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor, wanted: WantedTokens
    ) -> torch.Tensor:
        """Attention's output [N, E] for the wanted tokens only."""
        attended = self._attended(self.first(x_TE), positions_T, cos_sin)
        projected: torch.Tensor = self.o_proj(attended[wanted.index])
        return projected

    def store(self, x_TE: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Stores the latents of all T tokens, and nobody attends."""
        row_TR = self.first.some_outputs(x_TE, self._query_size, self.first.out_features)
        nothing = row_TR.new_empty(len(row_TR), 0, self.latents.query_width)
        latent_store(self._new(nothing, row_TR, positions_T, cos_sin), self.layer_name)

    def _attended(self, first_TC: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
        """[T, H * V] from the first product's outputs, which are overwritten."""
        query_TQ, row_TR = first_TC[:, : self._query_size], first_TC[:, self._query_size :]
        if self.q_b_proj is not None and self.q_a_layernorm is not None:
            query_TQ = self.q_b_proj(self.q_a_layernorm(query_TQ))
        query_THD = query_TQ.view(-1, self.num_heads, self.latents.query_width)
        new = self._new(query_THD, row_TR, positions_T, cos_sin)
        return latent_attention(new, self.kv_b_proj.weight, self.layer_name).flatten(1)

    def _new(
        self, query_THD: torch.Tensor, row_TR: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor
    ) -> NewLatents:
        norm, interleaved = self.kv_a_layernorm, self.latents.interleaved
        return NewLatents(query_THD, row_TR, norm.weight, norm.eps, positions_T, cos_sin, interleaved)
