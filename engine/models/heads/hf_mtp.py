"""A head for multi-token prediction whose decoder layer is of transformers' modules, as all of its model's are.

What it computes is what `MtpHead` does (mtp.py), by the names that DeepSeek-V3's checkpoints have: GLM-4.5's
(transformers' glm4_moe, vLLM's glm4_moe_mtp).

Legend: T tokens of the step, R rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tandem.engine.models.heads.mtp_ends import MtpEnds
from tandem.engine.models.heads.taps import FeatureTaps
from tandem.engine.models.hf.attention import layer_name, without_attending
from tandem.kernels.api.attention import Attention

if TYPE_CHECKING:
    from tandem.engine.models.hf.model import HFModel


class HFMtpHead(nn.Module):
    """Implements `GuessHead`."""

    token_W: torch.Tensor

    def __init__(
        self, model: HFModel, ends: MtpEnds, num_speculative_tokens: int, attention_backend: str = "auto"
    ) -> None:
        """`model`: the served one, loaded with its `mtp_layer`; where ranks share it out that layer is this rank's
        share, and sums what ranks add up. Nodes that share out experts have all of it."""
        super().__init__()
        assert model.mtp_layer is not None
        number, needs, embedding_VE = model.config.num_layers, model.needs[-1], model.embedding_VE
        self.hidden_size, self.vocab_size = model.config.hidden_size, model.vocab_size
        self.group, self.num_speculative_tokens = model.group, num_speculative_tokens
        self.dtype, self.taps, self.layer_name = embedding_VE.dtype, FeatureTaps([number]), layer_name(number)
        self.layer: Any = model.mtp_layer
        self.ends = ends
        self._rotations: Any = model.decoder.rotary_emb
        self.attention = Attention(
            needs.num_heads,
            needs.head_dim,
            needs.scale,
            needs.num_kv_heads,
            attn_backend=None if attention_backend == "auto" else attention_backend,
            layer_name=self.layer_name,
            hides_first=True,
        )
        self.register_buffer("token_W", torch.arange(model.vocab_size, device=embedding_VE.device))
        self.requires_grad_(False)

    def fuse(self) -> torch.Tensor:
        """The features [T, E] of the tokens of the pass that has just run."""
        return self.taps.taken()

    def store(self, token_T: torch.Tensor, feature_TE: torch.Tensor, position_T: torch.Tensor) -> None:
        """Stores keys and values of tokens, each with the feature of the token before it. Within a forward context."""
        x_1TE = self.ends.enter(token_T, feature_TE)[None]
        with without_attending():
            self.layer.self_attn(self.layer.input_layernorm(x_1TE), **self._at(x_1TE, position_T))

    def forward(self, token_R: torch.Tensor, feature_RE: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
        """[R, E]: what stands for the features of these tokens. Stores their keys and values."""
        x_1RE = self.ends.enter(token_R, feature_RE)[None]
        return self.ends.carry(self.layer(x_1RE, **self._at(x_1RE, position_R))[0])

    def project(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> logits [R, V]."""
        return self.ends.project(hidden_RE)

    def _at(self, x_1TE: torch.Tensor, position_T: torch.Tensor) -> dict[str, Any]:
        """What the layer is told of its tokens' places."""
        positions = position_T[None]
        return {
            "attention_mask": None,
            "position_ids": positions,
            "position_embeddings": self._rotations(x_1TE, positions),
        }
