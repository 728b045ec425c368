"""A decoder of transformers as the runner wants models: hidden states first, logits of the wanted ones after."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from tandem.engine.models.hf.attention import at_positions
from tandem.engine.models.hf.config import HFConfig
from tandem.engine.models.hf.layers import decoder_of, make_layers, sinks_of
from tandem.engine.parallel.group import TensorParallel
from tandem.kernels.products.rotary_attention import WantedTokens


@dataclass
class _Hidden(MoeModelOutputWithPast):
    """A decoder's output that holds hidden states alone; other fields that a head may look for are empty."""

    cross_attentions: None = None


class _DecoderStub(nn.Module):
    """Stands in for the decoder within a head and returns the hidden states that it is given. So the head's own code
    makes the logits, with whatever scales or caps it has."""

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **more: object) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class HFModel(nn.Module):
    """`causal`: a ...ForCausalLM of transformers, loaded, on its device. T tokens, N rows, E hidden size, V logits."""

    group: TensorParallel | None = None  # ranks share out native models alone

    def __init__(self, causal: PreTrainedModel, config: HFConfig, attention_backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        name, self.decoder = decoder_of(causal)
        self.attention_layers = make_layers(config.layers, attention_backend, sinks_of(causal, config.layers))
        causal.set_submodule(name, _DecoderStub())
        self.head = causal
        self.requires_grad_(False)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, wanted: WantedTokens | None = None
    ) -> torch.Tensor:
        """int [T], int64 [T] -> hidden states [N, E] of the wanted tokens (None: of all T)."""
        with at_positions(positions_T):
            output = self.decoder(input_ids=input_ids_T[None].long(), position_ids=positions_T[None], use_cache=False)
        hidden_TE: torch.Tensor = output.last_hidden_state[0]
        return hidden_TE if wanted is None else hidden_TE[wanted.index]

    def project(self, hidden_NE: torch.Tensor, out_NV: torch.Tensor | None = None) -> torch.Tensor:
        """[N, E] -> logits [N, V] in the model's dtype."""
        logits_NV: torch.Tensor = self.head(inputs_embeds=hidden_NE[None], use_cache=False).logits[0]
        return logits_NV if out_NV is None else out_NV.copy_(logits_NV)

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] -> logits fp32 [N, V]."""
        return self.project(hidden_NE).float()
