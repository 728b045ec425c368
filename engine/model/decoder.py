"""One decoder for Llama, Mistral, Qwen2 and Qwen3, in plain PyTorch over tandem's attention.

Legend: T tokens of the step (all sequences one after another), E hidden size, H query heads, K KV heads, D head_dim,
V vocabulary. Projections are merged: QKV into one matrix, gate and up into one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from tandem.engine.model.rope import RotaryEmbedding, rotate
from tandem.engine.model_config import ModelConfig
from tandem.kernels.attention import Attention, unified_attention


class RMSNorm(nn.Module):
    """Root mean square normalisation (arXiv 1910.07467): statistics in fp32, the weight in the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x32 = x.float()
        normed = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layer_name = f"model.layers.{layer}.self_attn"
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.attention = Attention(
            config.num_heads,
            config.head_dim,
            config.head_dim**-0.5,
            config.num_kv_heads,
            sliding_window=config.window_of(layer),
            attn_backend=None if backend == "auto" else backend,
            layer_name=self.layer_name,
        )

    def forward(self, x_TE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv_proj(x_TE).view(-1, heads + 2 * kv_heads, self.head_dim)
        q_THD, k_TKD, v_TKD = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = rotate(q_THD, cos, sin), rotate(k_TKD, cos, sin)
        out = unified_attention(q_THD.contiguous(), k_TKD.contiguous(), v_TKD.contiguous(), self.layer_name)
        projected: torch.Tensor = self.o_proj(out.reshape(-1, heads * self.head_dim))
        return projected


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_TE: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x_TE).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, layer, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TE: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x_TE = x_TE + self.self_attn(self.input_layernorm(x_TE), cos, sin)
        return x_TE + self.mlp(self.post_attention_layernorm(x_TE))


class DecoderModel(nn.Module):
    """Parameters are uninitialised until engine/loader.py fills them."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, attention_backend: str = "auto"
    ) -> None:
        super().__init__()
        self.config = config
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
                self.layers = nn.ModuleList(
                    DecoderLayer(config, i, attention_backend) for i in range(config.num_layers)
                )
                self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        finally:
            torch.set_default_dtype(default)
        self.to_empty(device=device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = RotaryEmbedding(config.rope, config.head_dim).to(device)
        self.requires_grad_(False)
        blocks = [module for module in self.modules() if isinstance(module, SelfAttention)]
        self.attention_layers: dict[str, Attention] = {block.layer_name: block.attention for block in blocks}

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def bind_kv_cache(self, pool: torch.Tensor) -> None:
        """`pool` `[num_blocks, K, num_layers, 2, block_size, D]`; layer l gets the view `pool[:, :, l]`."""
        for index, attention in enumerate(self.attention_layers.values()):
            attention.kv_cache = [pool[:, :, index]]

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, wanted_N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int [T], int64 [T] -> normalised hidden states of the tokens `wanted_N` (int64 indices; None: of all T).

        Attention metadata comes by the forward context.
        """
        x_TE = self.embed_tokens(input_ids_T)
        cos, sin = self.rotary(positions_T, x_TE.dtype)
        for layer in self.layers:
            x_TE = layer(x_TE, cos, sin)
        hidden: torch.Tensor = self.norm(x_TE if wanted_N is None else x_TE[wanted_N])
        return hidden

    def project(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] -> logits [N, V] in the model's dtype."""
        logits: torch.Tensor = self.lm_head(hidden_NE)
        return logits

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] -> fp32 [N, V]."""
        return self.project(hidden_NE).float()
