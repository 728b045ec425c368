"""One decoder for Llama, Mistral, Mixtral, Qwen2, MiMo, Qwen3, Qwen3-MoE, DeepSeek-V2 and V3, and GPT-OSS in MXFP4, in
plain PyTorch over tandem's attention.

Legend: T tokens of the step (all sequences one after another), R of a step of few rows, N of them wanted, E hidden
size, V vocabulary. Projections of layers are merged: QKV into one matrix, gate and up into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import nn

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.models.adapter_sites import Site, decoder_sites
from tandem.engine.models.compiled import compiled
from tandem.engine.models.heads.taps import GuessHead
from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.engine.models.layers.decoder_layer import DecoderLayer, allocate_parameters, lay_out, quantise_layers
from tandem.engine.models.layers.latents import LatentSelfAttention
from tandem.engine.models.layers.self_attention import SelfAttention
from tandem.engine.models.mixture_layer import MixtureOfExperts
from tandem.engine.models.rope import RotaryEmbedding
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.products import few_rows
from tandem.kernels.products.adapter_rows import AdapterStack, UnaddedProduct
from tandem.kernels.products.adapters import added
from tandem.kernels.products.fused_ops import embedding
from tandem.kernels.products.matmul import linear
from tandem.kernels.products.rotary_attention import UpToAttention, WantedTokens


def shard_of_model(group: TensorParallel | None, expert_group: ExpertGroup | None) -> Shard:
    """What of a model is here."""
    if expert_group is not None:
        return expert_group.shard
    return Shard() if group is None else group.shard


class DecoderModel(nn.Module):
    """Parameters are uninitialised until engine/models/loader.py fills them. With a group, it is one rank's share of
    the model, and hidden states are whole on every rank: what a norm takes in is a sum over ranks."""

    encoder = None
    cross_layers: Mapping[str, Attention] = MappingProxyType({})

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        attention_backend: str = "auto",
        group: TensorParallel | None = None,
        scale_dtype: torch.dtype = torch.float16,
        expert_group: ExpertGroup | None = None,
    ) -> None:
        """`scale_dtype`: of the scales of weights of 4 bits. `expert_group`: the nodes that share its experts out."""
        super().__init__()
        self.config = config
        self.group, self.expert_group = group, expert_group
        self.shard = shard_of_model(group, expert_group)
        self.media_encoder: None = None  # it takes text alone
        own = self.shard.config(config)
        first, last = (0, config.vocab_size) if group is None else group.shard.vocab(config)
        self._head_rows = slice(first, last) if config.tie_word_embeddings else slice(None)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                # From a tensor, since drawing values on the meta device imports torch's compiler: seconds of the start.
                self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(config.vocab_size, config.hidden_size))
                self.layers = nn.ModuleList(
                    DecoderLayer(own, i, attention_backend, group) for i in range(config.num_layers)
                )
                self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, group)
                self.lm_head = Linear(config.hidden_size, last - first, bias=False)
        finally:
            torch.set_default_dtype(default)
        if config.quantisation is not None:
            ranks = "" if group is None else "; take a smaller --tensor-parallel-size"
            quantise_layers(self.layers, config.quantisation, config.architecture, scale_dtype, device, ranks)
        allocate_parameters(self, device)
        self._exchange(dtype)
        self.expert_counts = self._count_experts(device)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.rotary = RotaryEmbedding(config.rope, config.rotary_size, config.max_model_len + 2).to(device)
        self.requires_grad_(False)
        self._few_rows_products: tuple[tuple[int, int], ...] = ()
        self._compiled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        blocks = [module for module in self.modules() if isinstance(module, SelfAttention | LatentSelfAttention)]
        self.attention_layers: dict[str, Attention] = {block.layer_name: block.attention for block in blocks}
        self.guess_head: GuessHead | None = None

    def _exchange(self, dtype: torch.dtype) -> None:
        """Has mixtures exchange tokens with the other nodes of the group, if there is one."""
        group, mixture = self.expert_group, self.config.mixture
        if group is None or mixture is None:
            return
        group.open(self.config.hidden_size, mixture.top_k, mixture.num_experts, dtype)
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.exchange_in(group)

    def _count_experts(self, device: torch.device | str) -> torch.Tensor | None:
        """int32 [layers with experts, experts]: how many tokens chose each so far, counted by rank 0 (0 elsewhere)."""
        layers = [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
        if self.config.mixture is None or not layers or (self.group is not None and self.group.shard.rank):
            return None
        counts_LX = torch.zeros((len(layers), self.config.mixture.num_experts), dtype=torch.int32, device=device)
        for layer, counts_X in zip(layers, counts_LX, strict=True):
            layer.count_in(counts_X)
        return counts_LX

    def finish_loading(self) -> None:
        """Lays weights out as the products want them. To be called once, when the parameters are filled."""
        lay_out(self.layers, self.embed_tokens.weight.dtype)
        ordinary = [layer for layer in self._layers() if not layer.is_dense_exception]
        self._few_rows_products = ordinary[0].few_rows_products() if ordinary else ()

    def _embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        return embedding(input_ids_T, self.embed_tokens.weight)

    def _layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def take_guess_head(self, head: GuessHead) -> None:
        """Has passes leave their features for a head, whose keys and values become the pool's last layer."""
        self.guess_head = head
        self.attention_layers[head.layer_name] = head.attention

    def adapter_sites(self) -> tuple[Site, ...]:
        """The products that adapters may be added to, as this rank computes them."""
        return decoder_sites(self.config, self.shard)

    def take_adapters(self, stacks: Mapping[str, AdapterStack]) -> None:
        """Makes projections add what rows' adapters say. `stacks`: by the names of their modules."""
        for name, stack in stacks.items():
            module = self.get_submodule(name)
            assert isinstance(module, Linear)
            module.take_adapters(stack)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def embedding_VE(self) -> torch.Tensor:
        return self.embed_tokens.weight

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, wanted: WantedTokens | None = None
    ) -> torch.Tensor:
        """int [T], int64 [T] -> normalised hidden states of the wanted tokens (None: of all T).

        Attention metadata comes by the forward context. What only the tokens that are not wanted would need is not
        computed: of the last layer that is everything but keys and values, unless a head reads all outputs.
        """
        if self._compiled is not None:
            hidden_TE = self._compiled(input_ids_T, positions_T)
            return hidden_TE if wanted is None else hidden_TE[wanted.index]
        residual_TE = self._embed(input_ids_T)
        if self._takes_few_rows(residual_TE, wanted):
            cos_sin = self.rotary.table()
            for index, each in enumerate(self._layers()):
                self._tap(index, None, residual_TE)
                each.forward_few_rows(residual_TE, positions_T, cos_sin)
            few: torch.Tensor = self.norm(residual_TE)
            self._tap(len(self.layers), None, few)
            return few
        x_TE, residual_TE = self._before_last(residual_TE, positions_T)
        return self._last_layer(x_TE, residual_TE, positions_T, wanted)

    @property
    def can_be_divided(self) -> bool:
        """See DividedModel."""
        is_plain = self._compiled is None and self.guess_head is None and self.config.latents is None
        return is_plain and len(self.layers) > 1

    def up_to_last_attention(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> UpToAttention:
        """See DividedModel."""
        x_TE, residual_TE = self._before_last(self._embed(input_ids_T), positions_T)
        assert not isinstance(x_TE, UnaddedProduct), "a pass without adapters"
        return self._divided_layer.up_to_attention(x_TE, residual_TE)

    def from_last_attention(
        self, last: UpToAttention, positions_T: torch.Tensor, wanted: WantedTokens | None
    ) -> torch.Tensor:
        """See DividedModel."""
        x_TE, residual_TE = self._divided_layer.from_attention(last, positions_T, self.rotary.table(), wanted)
        hidden: torch.Tensor = self.norm(x_TE, residual_TE)
        return hidden

    @property
    def _divided_layer(self) -> DecoderLayer:
        layer = self.layers[-1]
        assert isinstance(layer, DecoderLayer)
        return layer

    def _before_last(
        self, residual_TE: torch.Tensor, positions_T: torch.Tensor
    ) -> tuple[torch.Tensor | UnaddedProduct | None, torch.Tensor]:
        x_TE, cos_sin = None, self.rotary.table()
        for index, layer in enumerate(self.layers[:-1]):
            self._tap(index, x_TE, residual_TE)
            x_TE, residual_TE = layer(x_TE, residual_TE, positions_T, cos_sin)
            if self.guess_head is not None and x_TE is not None:
                x_TE = added(x_TE)
        return x_TE, residual_TE

    def _last_layer(
        self,
        x_TE: torch.Tensor | UnaddedProduct | None,
        residual_TE: torch.Tensor,
        positions_T: torch.Tensor,
        wanted: WantedTokens | None,
    ) -> torch.Tensor:
        cos_sin = self.rotary.table()
        self._tap(len(self.layers) - 1, x_TE, residual_TE)
        if self.guess_head is not None and len(self.layers) in self.guess_head.taps.layers:
            every_TE: torch.Tensor = self.norm(*self.layers[-1](x_TE, residual_TE, positions_T, cos_sin))
            self._tap(len(self.layers), None, every_TE)
            return every_TE if wanted is None else every_TE[wanted.index]
        if get_forward_context().adapters is not None and wanted is not None:  # their tiles are of all rows
            x_TE, residual_TE = self.layers[-1](x_TE, residual_TE, positions_T, cos_sin)
            x_TE = None if x_TE is None else added(x_TE)[wanted.index]
            residual_TE = residual_TE[wanted.index]
        else:
            x_TE, residual_TE = self.layers[-1](x_TE, residual_TE, positions_T, cos_sin, wanted)
        hidden: torch.Tensor = self.norm(x_TE, residual_TE)
        return hidden

    def _tap(self, layer: int, x_TE: torch.Tensor | UnaddedProduct | None, residual_TE: torch.Tensor) -> None:
        if self.guess_head is None or layer not in self.guess_head.taps.layers:
            return
        assert not isinstance(x_TE, UnaddedProduct), "heads take whole products"
        if self.group is not None and x_TE is not None:
            x_TE = self.group.sum(x_TE.clone())
        self.guess_head.taps.take(layer, x_TE, residual_TE)

    def compile_forward(self) -> None:
        """Has torch.compile make all but attention, when a pass first runs. Raises ConfigError for what can't be."""
        if self.group is not None or any(isinstance(each, Linear) and each.adapters for each in self.modules()):
            raise ConfigError("--compile goes neither with --tensor-parallel-size nor --enable-lora: leave one out")
        if self.guess_head is not None:
            raise ConfigError("--compile doesn't go with a head that guesses (eagle3, mtp): leave one out")
        if self.config.mixture is not None or self.config.latents is not None:
            what = "experts" if self.config.latents is None else "latents"
            raise ConfigError(
                f"--compile doesn't go with {what}, whose kernels it would not use: leave it out, or take --model-impl "
                "transformers"
            )
        if self.config.quantisation is not None:
            raise ConfigError(
                "--compile doesn't go with quantised weights, whose kernels it would not use: leave it out"
            )
        self.rotary.table()  # made now, not by what is traced
        self._compiled = compiled(self._every_token)

    def _every_token(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Normalised hidden states [T, E] of all T tokens, by what torch.compile can trace."""
        x_TE, residual_TE, cos_sin = None, self._embed(input_ids_T), self.rotary.table()
        for layer in self.layers:
            x_TE, residual_TE = layer(x_TE, residual_TE, positions_T, cos_sin)
        hidden_TE: torch.Tensor = self.norm(x_TE, residual_TE)
        return hidden_TE

    def _takes_few_rows(self, residual_TE: torch.Tensor, wanted: WantedTokens | None) -> bool:
        """Whether this is a decode step of few rows that the fused products serve. A rank of a group sums with the
        others between products."""
        if self.group is not None or wanted is not None or not self._few_rows_products:
            return False
        context = get_forward_context()
        if context.adapters is not None:
            return False
        metadata = context.any_metadata()
        only_decodes = isinstance(metadata, AttentionMetadata) and metadata.num_decode_rows == len(residual_TE)
        return only_decodes and few_rows.serves(residual_TE, self._few_rows_products)

    def project(self, hidden_NE: torch.Tensor, out_NV: torch.Tensor | None = None) -> torch.Tensor:
        """[N, E] -> logits [N, V] in the model's dtype; in a group only those of this rank's run of the vocabulary."""
        return linear(hidden_NE, self.lm_head.weight[self._head_rows], None, out_NV)

    def whole_output(self) -> torch.Tensor:
        """The output matrix [V, E]; of several ranks a copy that each has whole, made by all of them together."""
        if self.group is None or self.config.tie_word_embeddings:
            return self.lm_head.weight
        return self.group.gather_rows(self.lm_head.weight)

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] -> logits fp32 [N, V] of the whole vocabulary."""
        logits = self.project(hidden_NE)
        return (logits if self.group is None else self.group.gather_logits(logits)).float()
