"""Self-attention whose heads have keys and values of their own.

T tokens of the step, N of them wanted, R of a step of few rows, E hidden size, C columns of the merged projection.
"""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.kernels.api.attention import Attention
from tandem.kernels.products import few_rows
from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.products.fused_ops import HeadNorms
from tandem.kernels.products.quantised import RoundedRows
from tandem.kernels.products.rotary_attention import (
    WantedTokens,
    rotary_attention,
    rotary_attention_of_wanted,
    rotary_store,
    traced_rotary_attention,
)


class SelfAttention(nn.Module):
    """One layer's attention with its projections. The heads are this rank's."""

    def __init__(self, config: ModelConfig, layer: int, backend: str, *, hides_first: bool = False) -> None:
        super().__init__()
        self.layer_name = f"model.layers.{layer}.self_attn"
        self.query_size = config.num_heads * config.head_dim
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = Linear(self.query_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if config.has_sinks else None
        self.attention = Attention(
            config.num_heads,
            config.head_dim,
            config.scale,
            config.num_kv_heads,
            sliding_window=config.window_of(layer),
            blocksparse_params=None if config.blocksparse is None else msgspec.structs.asdict(config.blocksparse),
            attn_backend=None if backend == "auto" else backend,
            layer_name=self.layer_name,
            hides_first=hides_first,
        )

    def finish_loading(self) -> None:
        """Has attention see the sinks, if there are any."""
        if self.sinks is not None:
            self.attention.take_sinks(self.sinks.data)

    @property
    def first(self) -> Linear:
        """What takes in hidden states."""
        return self.qkv_proj

    def forward(
        self,
        x_TE: torch.Tensor | RoundedRows,
        positions_T: torch.Tensor,
        cos_sin: torch.Tensor,
        stream_TE: torch.Tensor | None = None,
    ) -> torch.Tensor | UnaddedProduct | None:
        """Attention's output [T, E], whose adapters whoever takes it has to add; None where it has been added to the
        stream on the way."""
        qkv_TC = self.qkv_proj.product(x_TE)
        if torch.compiler.is_compiling():
            assert isinstance(qkv_TC, torch.Tensor)
            out = traced_rotary_attention(qkv_TC, positions_T, cos_sin, self.attention, self._head_norms())
        else:
            out = rotary_attention(qkv_TC, positions_T, cos_sin, self.layer_name, self._head_norms())
        return self.o_proj.product_onto(stream_TE, out)

    def forward_few_rows(
        self, residual_RE: torch.Tensor, norm: RMSNorm, positions_R: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        """residual += attention of the normalised residual, in three launches."""
        qkv, o = self.qkv_proj, self.o_proj
        qkv_RC = few_rows.norm_linear(residual_RE, norm.weight, norm.eps, qkv.weight, qkv.bias)
        out = rotary_attention(qkv_RC, positions_R, cos_sin, self.layer_name, self._head_norms())
        few_rows.add_linear(residual_RE, out, o.weight, o.bias)

    def keys_and_values(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Keys and values of all tokens [T, C], before they are rotated."""
        return self.qkv_proj.some_outputs(x_TE, self.query_size, self.qkv_proj.out_features)

    def forward_wanted(
        self,
        x_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin: torch.Tensor,
        wanted: WantedTokens,
        kv_TC: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention's output [N, E] for the wanted tokens only; the KV of every token is stored. `kv_TC`: from
        `keys_and_values`, where they have been computed; overwritten."""
        query_NC = self.qkv_proj.some_outputs(x_TE[wanted.index], 0, self.query_size)
        if kv_TC is None:
            kv_TC = self.keys_and_values(x_TE)
        out = rotary_attention_of_wanted(
            query_NC, kv_TC, positions_T, wanted, cos_sin, self.layer_name, self._head_norms()
        )
        projected: torch.Tensor = self.o_proj(out)
        return projected

    def store(self, x_TE: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Stores the keys and values of all T tokens, and nobody attends."""
        rotary_store(self.keys_and_values(x_TE), positions_T, cos_sin, self.layer_name, self._head_norms())

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
