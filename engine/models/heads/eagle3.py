"""An EAGLE-3 head: one decoder layer that guesses the next token from the last one and the model's hidden states.

As published (SafeAILab/EAGLE, arXiv 2503.01840): the feature of a token is a product of three of the model's hidden
states there. An entry is a token with the feature of the token before it; the layer attends to all entries so far, and
what it adds up to, before the last norm, stands for the feature that the next guess needs. Published code counts an
entry by its feature, we by its token, whose block then says all of it; rotation knows distances alone. The first token
has no feature before it, and so no entry: nobody sees position 0.

Legend: T tokens of the step, R rows, E hidden size, H query heads, K KV heads, D head size, V vocabulary, W that of the
head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tandem.engine.models.heads.eagle3_config import EagleConfig
from tandem.engine.models.heads.taps import FeatureTaps
from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.engine.models.layers.decoder_layer import allocate_parameters
from tandem.engine.models.layers.mlp import MLP
from tandem.engine.models.rope import RotaryEmbedding
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.api.attention import Attention
from tandem.kernels.products.rotary_attention import rotary_attention, rotary_store

LAYER_NAME = "eagle3.midlayer.self_attn"


class EagleHead(nn.Module):
    """Parameters are uninitialised until engine/models/heads/eagle3_loader.py fills them. Implements `GuessHead`."""

    token_W: torch.Tensor

    def __init__(
        self,
        config: EagleConfig,
        embedding_VE: torch.Tensor,
        num_speculative_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device | str,
        attention_backend: str = "auto",
        group: TensorParallel | None = None,
    ) -> None:
        """`embedding_VE`: the served model's, which it reads; `max_model_len`: that model's. With a group, its heads of
        attention and its columns of the MLP are this rank's; the rest is whole, and ranks make the same logits."""
        super().__init__()
        self.shard = Shard() if group is None else group.shard
        self.config, layer = config, self.shard.config(config.layer)
        self.group = group
        self.num_speculative_tokens, self.dtype = num_speculative_tokens, dtype
        self.layer_name, self.taps = LAYER_NAME, FeatureTaps(config.feature_layers)
        self.query_size = layer.num_heads * layer.head_dim
        width, size = self.query_size + 2 * layer.num_kv_heads * layer.head_dim, layer.hidden_size
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                self.fc = Linear(len(config.feature_layers) * size, size, bias=False)
                self.hidden_norm, self.input_layernorm, self.norm = (
                    RMSNorm(size, layer.rms_norm_eps) for _ in range(3)
                )
                self.post_attention_layernorm = RMSNorm(size, layer.rms_norm_eps, group)
                self.qkv_proj = Linear(2 * size, width, bias=layer.qkv_bias)
                self.o_proj = Linear(self.query_size, size, bias=layer.o_bias)
                self.mlp = MLP(layer.hidden_size, layer.intermediate_size, layer.mlp_bias)
                self.lm_head = Linear(size, config.draft_vocab_size, bias=False)
        finally:
            torch.set_default_dtype(default)
        allocate_parameters(self, device)
        self.register_buffer("token_W", torch.arange(config.draft_vocab_size, device=device))
        self.attention = Attention(
            layer.num_heads,
            layer.head_dim,
            layer.head_dim**-0.5,
            layer.num_kv_heads,
            attn_backend=None if attention_backend == "auto" else attention_backend,
            layer_name=LAYER_NAME,
            hides_first=True,
        )
        # As many positions as the served model: heads are trained on short texts, and say so.
        self.rotary = RotaryEmbedding(layer.rope, layer.head_dim, max_model_len + 2).to(device)
        self._embedding_VE = embedding_VE.detach()
        self.requires_grad_(False)

    @property
    def hidden_size(self) -> int:
        return self.config.layer.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.layer.vocab_size

    def fuse(self) -> torch.Tensor:
        """The features [T, E] of the tokens of the pass that has just run."""
        fused: torch.Tensor = self.fc(self.taps.taken())
        return fused

    def store(self, token_T: torch.Tensor, feature_TE: torch.Tensor, position_T: torch.Tensor) -> None:
        """Stores keys and values of tokens, each with the feature of the token before it. Within a forward context."""
        x_TF, _ = self._input(token_T, feature_TE)
        kv_TC = self.qkv_proj.some_outputs(x_TF, self.query_size, self.qkv_proj.out_features)
        rotary_store(kv_TC, position_T, self.rotary.table(), LAYER_NAME)

    def forward(self, token_R: torch.Tensor, feature_RE: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
        """[R, E]: what stands for the features of these tokens. Stores their keys and values."""
        x_RF, residual_RE = self._input(token_R, feature_RE)
        attended = rotary_attention(self.qkv_proj(x_RF), position_R, self.rotary.table(), LAYER_NAME)
        normed = self.post_attention_layernorm(self.o_proj(attended), residual_RE)
        made = self.mlp(normed) if self.group is None else self.group.sum(self.mlp(normed))
        hidden: torch.Tensor = made + residual_RE
        return hidden

    def project(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> logits [R, W] of the head's own vocabulary; entry w is of the token `token_W[w]`."""
        logits: torch.Tensor = self.lm_head(self.norm(hidden_RE))
        return logits

    def _input(self, token_T: torch.Tensor, feature_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the layer's products take [T, 2E], the residual stream, which may be written to)."""
        embedded = self.input_layernorm(F.embedding(token_T, self._embedding_VE))
        normed = self.hidden_norm(feature_TE)
        residual = normed.clone() if self.config.normalises_residual else feature_TE.clone()
        return torch.cat((embedded, normed), dim=-1), residual
