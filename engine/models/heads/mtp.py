"""A head for multi-token prediction: one more layer like the model's own, that guesses the token after the next.

As DeepSeek-V3's report (arXiv 2412.19437, 2.2) has it: the feature of a token is what leaves the model's last norm
there. An entry is a token with the feature of the token before it: the embedding and the feature, each normalised,
side by side, are projected to the layer's input. What leaves the layer stands for the next feature, so that the layer
guesses as often as is asked for; through a norm of the head's own it makes logits. As for EAGLE-3 an entry counts by
its token, and nobody sees position 0, which has no feature before it.

Legend: T tokens of the step, R rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.heads.mtp_config import MtpConfig
from tandem.engine.models.heads.mtp_ends import MtpEnds
from tandem.engine.models.heads.taps import FeatureTaps
from tandem.engine.models.layers.decoder_layer import DecoderLayer, allocate_parameters, lay_out, quantise_layers
from tandem.engine.parallel.sharding import Shard


class MtpHead(nn.Module):
    """Parameters are uninitialised until engine/models/heads/mtp_loader.py fills them. Implements `GuessHead`."""

    token_W: torch.Tensor

    def __init__(
        self,
        config: MtpConfig,
        model: DecoderModel,
        num_speculative_tokens: int,
        device: torch.device | str,
        attention_backend: str = "auto",
        scale_dtype: torch.dtype = torch.float16,
    ) -> None:
        """`model`: the served one, whose embedding, output matrix and rotations it uses. `scale_dtype`: of the scales
        of weights of 4 bits. Raises ConfigError for sizes that can't be quantised. Where ranks share the model out the
        layer is this rank's share, like the model's, and the rest whole. Nodes that share out experts have all of it.
        """
        super().__init__()
        self.group = group = None if device == "meta" else model.group
        self.shard = Shard() if group is None else group.shard
        layer, number = self.shard.config(config.layer), str(config.layer.num_layers)
        self.config, self.num_speculative_tokens = config.layer, num_speculative_tokens
        self.dtype, self.taps = model.embed_tokens.weight.dtype, FeatureTaps([layer.num_layers])
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with torch.device("meta"):
                decoder_layer = DecoderLayer(layer, layer.num_layers, attention_backend, group, hides_first=True)
                self.layers = nn.ModuleDict({number: decoder_layer})
        finally:
            torch.set_default_dtype(default)
        if layer.quantisation is not None:
            quantise_layers(self.layers, layer.quantisation, layer.architecture, scale_dtype, device)
        allocate_parameters(self, device)
        self.register_buffer("token_W", torch.arange(layer.vocab_size, device=device))
        self.layer_name, self.attention = decoder_layer.self_attn.layer_name, decoder_layer.self_attn.attention
        self.rotary = model.rotary
        self.ends = MtpEnds(
            layer.hidden_size,
            layer.rms_norm_eps,
            model.embed_tokens.weight,
            model.lm_head.weight if group is None else model.whole_output(),
            self.dtype,
            device,
            hidden_first=config.hidden_first,
            carries_normed=config.carries_normed,
        )
        self.requires_grad_(False)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def layer(self) -> DecoderLayer:
        [layer] = self.layers.values()
        assert isinstance(layer, DecoderLayer)
        return layer

    def finish_loading(self) -> None:
        """Lays weights out as the products want them. To be called once, when the parameters are filled."""
        lay_out(self.layers, self.dtype)

    def fuse(self) -> torch.Tensor:
        """The features [T, E] of the tokens of the pass that has just run."""
        return self.taps.taken()

    def store(self, token_T: torch.Tensor, feature_TE: torch.Tensor, position_T: torch.Tensor) -> None:
        """Stores what the cache keeps of tokens, each with the feature of the token before it. Within a forward
        context."""
        self.layer.store(self.ends.enter(token_T, feature_TE), position_T, self.rotary.table())

    def forward(self, token_R: torch.Tensor, feature_RE: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
        """[R, E]: what stands for the features of these tokens. Stores what the cache keeps of them."""
        entering_RE = self.ends.enter(token_R, feature_RE)
        added_RE, residual_RE = self.layer(None, entering_RE, position_R, self.rotary.table())
        if added_RE is None:
            return self.ends.carry(residual_RE)
        assert isinstance(added_RE, torch.Tensor), "heads take no adapters"
        if self.group is not None:
            added_RE = self.group.sum(added_RE)
        return self.ends.carry(added_RE + residual_RE)

    def project(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E] -> logits [R, V]."""
        return self.ends.project(hidden_RE)
