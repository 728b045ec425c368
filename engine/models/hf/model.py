"""A decoder of transformers as the runner wants models: hidden states first, logits of the wanted ones after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.media.encoder import MediaEncoder, MediaInputs
from tandem.engine.models.adapter_sites import Site
from tandem.engine.models.compiled import compiled
from tandem.engine.models.heads.layer_hooks import tap_layers
from tandem.engine.models.heads.taps import GuessHead
from tandem.engine.models.hf.attention import at_positions
from tandem.engine.models.hf.config import HFConfig
from tandem.engine.models.hf.encoder import HFEncoder
from tandem.engine.models.hf.layers import build_empty, decoder_of, make_cross_layers, make_layers, sinks_of
from tandem.engine.models.hf.low_rank import add_adapters, sites_of
from tandem.engine.models.hf.parallel import own_needs
from tandem.engine.models.hf.towers import TOWERS, TowerEncoder, forget_positions
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel
from tandem.kernels.products.adapter_rows import AdapterStack
from tandem.kernels.products.rotary_attention import WantedTokens


@dataclass
class _Hidden(MoeModelOutputWithPast):
    """A decoder's output that holds hidden states alone; other fields that a head may look for are empty."""

    cross_attentions: None = None


class _DecoderStub(nn.Module):
    """Stands in for the decoder within a model and returns the hidden states that it is given. So the model's own code
    makes the logits, with whatever scales or caps it has, and the embeddings that it would give its decoder."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        super().__init__()
        self._embedding: Any = decoder.get_input_embeddings

    def get_input_embeddings(self) -> nn.Module:
        return self._embedding()

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **more: object) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class HFModel(nn.Module):
    """A model as the runner calls it. `causal`: a ...ForCausalLM or ...ForConditionalGeneration of transformers,
    loaded, on its device.

    Shape legend: T tokens, N rows, E hidden size, V logits.
    """

    expert_counts: torch.Tensor | None = None  # nobody counts which experts transformers' routers choose

    def __init__(
        self,
        causal: PreTrainedModel,
        config: HFConfig,
        attention_backend: str = "auto",
        group: TensorParallel | None = None,
        expert_group: ExpertGroup | None = None,
        mtp_layer: nn.Module | None = None,
    ) -> None:
        """With a group of either kind `causal` is this process's part of the model (parallel.py). `mtp_layer`: the
        decoder layer of a head that guesses, which passes don't go through."""
        super().__init__()
        self.config, self.group, self.expert_group = config, group, expert_group
        self.needs = config.layers if group is None else own_needs(config.layers, group.shard)
        self._decoder_name, self.decoder = decoder_of(causal)
        self.attention_layers = make_layers(self.needs, attention_backend, sinks_of(causal, self.needs))
        self.cross_layers = make_cross_layers(config.cross_layers, attention_backend)
        self.encoder = None if config.encoder is None else HFEncoder(causal, self.decoder, config.encoder)
        if self.encoder is not None:
            self.encoder.attend_by(self.cross_layers)
        self._stub = _DecoderStub(self.decoder)
        causal.set_submodule(self._decoder_name, self._stub)
        self.head = causal
        self.requires_grad_(False)
        self._compiled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        self._takes_adapters = False
        self.media_encoder: MediaEncoder | None = None
        self.guess_head: GuessHead | None = None
        self.mtp_layer = mtp_layer
        if causal.config.model_type in TOWERS:
            self.media_encoder = TowerEncoder(causal, causal.device, causal.dtype)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def embedding_VE(self) -> torch.Tensor:
        embedding: Any = self.decoder.get_input_embeddings()
        weight: torch.Tensor = embedding.weight
        return weight

    def whole_output(self) -> torch.Tensor:
        """The output matrix [V, E]; of several ranks a copy that each has whole, made by all of them together."""
        output: Any = self.head.get_output_embeddings()
        weight: torch.Tensor = output.weight
        return weight if self.group is None else self.group.gather_rows(weight)

    def take_guess_head(self, head: GuessHead) -> None:
        """Has passes leave their features for a head, whose keys and values become the pool's last layer. Raises
        ConfigError where what enters layers is not at hand."""
        if self.media_encoder is not None:
            raise ConfigError(
                f"--speculative-config: eagle3 reads tokens, and {self.config.architecture} takes more than text: "
                "choose another method"
            )
        tap_layers(self.decoder, self.config.num_layers, head.taps)
        self.guess_head = head
        self.attention_layers[head.layer_name] = head.attention

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        wanted: WantedTokens | None = None,
        media: MediaInputs | None = None,
    ) -> torch.Tensor:
        """int [T], int64 [T] -> hidden states [N, E] of the wanted tokens (None: of all T). Ids below 0 are those of
        `media`."""
        ids_T = input_ids_T.long()
        if self.media_encoder is not None:
            ids_T = ids_T.clamp_min(0)
        tokens: dict[str, torch.Tensor] = {"input_ids": ids_T[None]}
        position_ids = positions_T[None]
        if media is not None and media.positions_3T is not None:
            position_ids = media.positions_3T[:, None]
        if media is not None and media.embedding_ME is not None:
            embedding: Any = self.decoder.get_input_embeddings()
            embeds_TE = embedding(ids_T)
            embeds_TE[media.index_M] = media.embedding_ME.to(embeds_TE.dtype)
            tokens = {"inputs_embeds": embeds_TE[None]}
        if self.encoder is not None:
            tokens["encoder_hidden_states"] = self.encoder.no_output
        with at_positions(positions_T):
            if self._compiled is not None:
                hidden_TE = self._compiled(ids_T, positions_T)
            else:
                output = self.decoder(**tokens, position_ids=position_ids, use_cache=False)
                hidden_TE = output.last_hidden_state[0]
        if self.guess_head is not None:
            self.guess_head.taps.take(self.config.num_layers, None, hidden_TE)
        return hidden_TE if wanted is None else hidden_TE[wanted.index]

    def adapter_sites(self) -> tuple[Site, ...]:
        """The products that adapters may be added to, as this rank computes them. Raises ConfigError for a model with
        an encoder, whose output goes through products of the decoder."""
        if self.encoder is not None:
            raise ConfigError(f"--enable-lora: {self.config.architecture} has an encoder, and takes no adapters")
        return sites_of(build_empty(deepcopy(self.head.config)), self.decoder)

    def take_adapters(self, stacks: Mapping[str, AdapterStack]) -> None:
        """Makes products add what rows' adapters say. `stacks`: by the names of sites."""
        for name, stack in stacks.items():
            add_adapters(self.decoder.get_submodule(name), stack)
        self._takes_adapters = bool(stacks)

    def compile_forward(self) -> None:
        """Has torch.compile make all but attention, when a pass first runs. Raises ConfigError for what can't be."""
        if self.group is not None or self._takes_adapters:
            raise ConfigError("--compile goes neither with --tensor-parallel-size nor --enable-lora: leave one out")
        if self.encoder is not None or self.media_encoder is not None:
            raise ConfigError(f"--compile: {self.config.architecture} takes more than text: leave it out")
        if self.config.quantisation is not None:
            raise ConfigError(
                "--compile doesn't go with quantised weights, whose kernels it would not use: leave it out"
            )
        self._compiled = compiled(self._every_token)

    def _every_token(self, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        output = self.decoder(input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False)
        hidden_TE: torch.Tensor = output.last_hidden_state[0]
        return hidden_TE

    def project(self, hidden_NE: torch.Tensor, out_NV: torch.Tensor | None = None) -> torch.Tensor:
        """[N, E] -> logits [N, V] in the model's dtype; in a group only those of this rank's run of the vocabulary."""
        if self.encoder is None:
            output = self.head(inputs_embeds=hidden_NE[None], use_cache=False)
        else:
            given = (self.encoder.no_output,)
            output = self.head(decoder_inputs_embeds=hidden_NE[None], encoder_outputs=given, use_cache=False)
        logits_NV: torch.Tensor = output.logits[0]
        return logits_NV if out_NV is None else out_NV.copy_(logits_NV)

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] -> logits fp32 [N, V] of the whole vocabulary."""
        logits = self.project(hidden_NE)
        return (logits if self.group is None else self.group.gather_logits(logits)).float()

    @contextmanager
    def whole(self) -> Iterator[PreTrainedModel]:
        """Within its `with` block, the model as transformers made it, decoder included."""
        self.head.set_submodule(self._decoder_name, self.decoder)
        try:
            yield self.head
        finally:
            self.head.set_submodule(self._decoder_name, self._stub)
            forget_positions(self.head)
