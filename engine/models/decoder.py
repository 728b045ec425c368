"""One decoder for Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE and DeepSeek-V2 and V3, in plain PyTorch over
tandem's attention.

Legend: T tokens of the step (all sequences one after another), E hidden size, H query heads, K KV heads, D head_dim,
V vocabulary. Projections are merged: QKV into one matrix, gate and up into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import msgspec
import torch
from torch import nn

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.weights.quantisation import MADE, Quantisation
from tandem.engine.models.adapter_sites import Site, decoder_sites
from tandem.engine.models.compiled import compiled
from tandem.engine.models.heads.taps import GuessHead
from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.engine.models.layers.latents import LatentSelfAttention
from tandem.engine.models.mixture_layer import MixtureOfExperts, StackedExperts
from tandem.engine.models.rope import RotaryEmbedding
from tandem.engine.models.stored_layers import empty_weight
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.api.metadata import AttentionMetadata
from tandem.kernels.products import few_rows
from tandem.kernels.products.adapter_rows import AdapterStack
from tandem.kernels.products.adapters import expand_silu_mul, linear_and_low
from tandem.kernels.products.fused_ops import HeadNorms, silu_mul
from tandem.kernels.products.matmul import group_gate_up, linear, linear_silu_mul
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP
from tandem.kernels.products.quantised import RoundedRows
from tandem.kernels.products.rotary_attention import (
    WantedTokens,
    rotary_attention,
    rotary_attention_of_wanted,
    traced_rotary_attention,
)


class SelfAttention(nn.Module):
    """One layer's attention with its projections. The heads are this rank's."""

    def __init__(self, config: ModelConfig, layer: int, backend: str) -> None:
        super().__init__()
        self.layer_name = f"model.layers.{layer}.self_attn"
        self.query_size = config.num_heads * config.head_dim
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = Linear(self.query_size, config.hidden_size, bias=config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.attention = Attention(
            config.num_heads,
            config.head_dim,
            config.scale,
            config.num_kv_heads,
            sliding_window=config.window_of(layer),
            blocksparse_params=None if config.blocksparse is None else msgspec.structs.asdict(config.blocksparse),
            attn_backend=None if backend == "auto" else backend,
            layer_name=self.layer_name,
        )

    @property
    def first(self) -> Linear:
        """What takes in hidden states."""
        return self.qkv_proj

    def forward(
        self, x_TE: torch.Tensor | RoundedRows, positions_T: torch.Tensor, cos_sin: torch.Tensor
    ) -> torch.Tensor:
        qkv_TC = self.qkv_proj(x_TE)
        if torch.compiler.is_compiling():
            out = traced_rotary_attention(qkv_TC, positions_T, cos_sin, self.attention, self._head_norms())
        else:
            out = rotary_attention(qkv_TC, positions_T, cos_sin, self.layer_name, self._head_norms())
        projected: torch.Tensor = self.o_proj(out)
        return projected

    def forward_few_rows(
        self, residual_RE: torch.Tensor, norm: RMSNorm, positions_R: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        """residual += attention of the normalised residual, in three launches."""
        qkv, o = self.qkv_proj, self.o_proj
        qkv_RC = few_rows.norm_linear(residual_RE, norm.weight, norm.eps, qkv.weight, qkv.bias)
        out = rotary_attention(qkv_RC, positions_R, cos_sin, self.layer_name, self._head_norms())
        few_rows.add_linear(residual_RE, out, o.weight, o.bias)

    def forward_wanted(
        self, x_TE: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor, wanted: WantedTokens
    ) -> torch.Tensor:
        """Attention's output [N, E] for the wanted tokens only; the KV of every token is stored."""
        qkv, size = self.qkv_proj, self.query_size
        query_NC = qkv.some_outputs(x_TE[wanted.index], 0, size)
        kv_TC = qkv.some_outputs(x_TE, size, qkv.out_features)
        out = rotary_attention_of_wanted(
            query_NC, kv_TC, positions_T, wanted, cos_sin, self.layer_name, self._head_norms()
        )
        projected: torch.Tensor = self.o_proj(out)
        return projected

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class MLP(nn.Module):
    """A layer's MLP, down(silu(gate) * up). gate_up_proj is loaded as gate over up; `group` then lets rows of both take
    turns, so that one product can end in silu(gate) * up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.is_grouped = False

    def group(self) -> None:
        both = self.gate_up_proj
        if self.is_grouped or both.bias is not None or both.out_features % (2 * GATE_UP_GROUP):
            return
        if both.quantised is None:
            both.weight.data = group_gate_up(both.weight.data)
        else:
            order = torch.arange(both.out_features, device=both.quantised.scales.device)
            both.hold(both.quantised.reordered(group_gate_up(order)))
        self.is_grouped = True

    def forward(self, x_TE: torch.Tensor | RoundedRows) -> torch.Tensor:
        both, group = self.gate_up_proj, GATE_UP_GROUP if self.is_grouped else 0
        if both.adapters is not None and (rows := get_forward_context().adapters) is not None:
            assert isinstance(x_TE, torch.Tensor)
            gate_up, low = linear_and_low(x_TE, both.matrix, both.bias, both.adapters, rows)
            activated = expand_silu_mul(gate_up, low, both.adapters, rows, group)
        elif self.is_grouped:
            activated = linear_silu_mul(x_TE, both.matrix)
        else:
            activated = silu_mul(both(x_TE))
        out: torch.Tensor = self.down_proj(activated)
        return out

    def forward_few_rows(self, residual_RE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> None:
        """residual += MLP of the normalised residual, in two launches."""
        activated = few_rows.norm_linear_silu_mul(residual_RE, gain_E, eps, self.gate_up_proj.weight)
        few_rows.add_linear(residual_RE, activated, self.down_proj.weight, self.down_proj.bias)

    def few_rows_products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the products of `forward_few_rows`; none if it can't be called."""
        blocks = self.gate_up_proj, self.down_proj
        if not self.is_grouped or any(block.quantised is not None for block in blocks):
            return ()
        return tuple((block.out_features, block.in_features) for block in blocks)


class DecoderLayer(nn.Module):
    """Attention and MLP of one layer, each after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int, backend: str, group: TensorParallel | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, group)
        attention = SelfAttention if config.latents is None else LatentSelfAttention
        self.self_attn: SelfAttention | LatentSelfAttention = attention(config, layer, backend)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, group)
        mixture = config.mixture
        is_dense = mixture is None or layer in mixture.dense_layers
        self.is_dense_exception = is_dense and mixture is not None
        self.mlp = MLP(config) if is_dense or mixture is None else MixtureOfExperts(config.hidden_size, mixture)

    def forward(
        self,
        x_TE: torch.Tensor | None,
        residual_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin: torch.Tensor,
        wanted: WantedTokens | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what is still to be added to the residual stream, the stream). With `wanted`, only those tokens."""
        summands = (residual_TE,) if x_TE is None else (x_TE, residual_TE)
        if wanted is None:
            normed = self.input_layernorm.before(self.self_attn.first, *summands)
            attended = self.self_attn(normed, positions_T, cos_sin)
        else:
            attended = self.self_attn.forward_wanted(self.input_layernorm(*summands), positions_T, cos_sin, wanted)
            residual_TE = residual_TE[wanted.index]
        product = self.mlp.gate_up_proj if isinstance(self.mlp, MLP) else None
        normed = self.post_attention_layernorm.before(product, attended, residual_TE)
        added: torch.Tensor = self.mlp(normed)
        return added, residual_TE

    def forward_few_rows(self, residual_RE: torch.Tensor, positions_R: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """`forward` of a decode step of few rows, in place: each product is fused with the operations around it, but
        for the wide MLP that a layer without experts has among others with them."""
        self.self_attn.forward_few_rows(residual_RE, self.input_layernorm, positions_R, cos_sin)
        norm = self.post_attention_layernorm
        if self.is_dense_exception:
            residual_RE += self.mlp(norm(residual_RE))
        else:
            self.mlp.forward_few_rows(residual_RE, norm.weight, norm.eps)

    def few_rows_products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the products of `forward_few_rows`; none if it can't be called."""
        blocks, of_mlp = (self.self_attn.first, self.self_attn.o_proj), self.mlp.few_rows_products()
        if not of_mlp or any(block.quantised is not None for block in blocks):
            return ()
        return (*((block.out_features, block.in_features) for block in blocks), *of_mlp)


def allocate_parameters(model: nn.Module, device: torch.device | str) -> None:
    """Makes uninitialised parameters on the device. torch's to_empty would import an algebra system (sympy)."""
    for module in list(model.modules()):
        for name, value in list(module.named_parameters(recurse=False)):
            empty = torch.empty(value.shape, dtype=value.dtype, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=False))


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
    ) -> None:
        """`scale_dtype`: of the scales of weights of 4 bits."""
        super().__init__()
        self.config = config
        self.group = group
        self.media_encoder: None = None  # it takes text alone
        own = config if group is None else group.shard.config(config)
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
            self._quantise(config.quantisation, scale_dtype, device)
        allocate_parameters(self, device)
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

    def _count_experts(self, device: torch.device | str) -> torch.Tensor | None:
        """int32 [layers with experts, experts]: how many tokens chose each so far, counted by rank 0 (0 elsewhere)."""
        layers = [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
        if self.config.mixture is None or not layers or (self.group is not None and self.group.shard.rank):
            return None
        counts_LX = torch.zeros((len(layers), self.config.mixture.num_experts), dtype=torch.int32, device=device)
        for layer, counts_X in zip(layers, counts_LX, strict=True):
            layer.count_in(counts_X)
        return counts_LX

    def _quantise(self, how: Quantisation, scale_dtype: torch.dtype, device: torch.device | str) -> None:
        """Gives the layers' products quantised weights, uninitialised. Raises ConfigError for sizes that have none."""
        for name, module in self.layers.named_modules():
            if isinstance(module, Linear) and how.leaves_out_merged(f"model.layers.{name}"):
                continue
            if how.stored == MADE and name.endswith("kv_b_proj"):  # it would only be made plain again
                continue
            try:
                if isinstance(module, StackedExperts):
                    module.quantise(how, f"layers.{name}", self.config.architecture, scale_dtype, device)
                elif isinstance(module, Linear):
                    module.hold(empty_weight(how, module.out_features, module.in_features, scale_dtype, device))
            except ValueError as error:
                ranks = "" if self.group is None else "; take a smaller --tensor-parallel-size"
                raise ConfigError(f"layers.{name} can't be quantised so: {error}{ranks}") from None

    def finish_loading(self) -> None:
        """Lays weights out as the products want them. To be called once, when the parameters are filled."""
        for module in self.modules():
            if isinstance(module, MLP):
                module.group()
            elif isinstance(module, LatentSelfAttention):
                module.finish_loading(self.embed_tokens.weight.dtype)
            elif isinstance(module, MixtureOfExperts):
                module.fold_shared()
        ordinary = [layer for layer in self._layers() if not layer.is_dense_exception]
        self._few_rows_products = ordinary[0].few_rows_products() if ordinary else ()

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
        return decoder_sites(self.config, Shard(0, 1) if self.group is None else self.group.shard)

    def take_adapters(self, stacks: Mapping[str, AdapterStack]) -> None:
        """Makes projections add what rows' adapters say. `stacks`: by the names of their modules."""
        for name, stack in stacks.items():
            module = self.get_submodule(name)
            assert isinstance(module, Linear)
            module.take_adapters(stack)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, wanted: WantedTokens | None = None
    ) -> torch.Tensor:
        """int [T], int64 [T] -> normalised hidden states of the wanted tokens (None: of all T).

        Attention metadata comes by the forward context. What only the tokens that are not wanted would need is not
        computed: of the last layer that is everything but keys and values.
        """
        if self._compiled is not None:
            hidden_TE = self._compiled(input_ids_T, positions_T)
            return hidden_TE if wanted is None else hidden_TE[wanted.index]
        residual_TE = self.embed_tokens(input_ids_T)
        cos_sin = self.rotary.table()
        if self._takes_few_rows(residual_TE, wanted):
            for index, each in enumerate(self._layers()):
                self._tap(index, None, residual_TE)
                each.forward_few_rows(residual_TE, positions_T, cos_sin)
            few: torch.Tensor = self.norm(residual_TE)
            return few
        x_TE = None
        for index, layer in enumerate(self.layers[:-1]):
            self._tap(index, x_TE, residual_TE)
            x_TE, residual_TE = layer(x_TE, residual_TE, positions_T, cos_sin)
        self._tap(len(self.layers) - 1, x_TE, residual_TE)
        if get_forward_context().adapters is not None and wanted is not None:  # their tiles are of all rows
            x_TE, residual_TE = self.layers[-1](x_TE, residual_TE, positions_T, cos_sin)
            assert x_TE is not None
            x_TE, residual_TE = x_TE[wanted.index], residual_TE[wanted.index]
        else:
            x_TE, residual_TE = self.layers[-1](x_TE, residual_TE, positions_T, cos_sin, wanted)
        hidden: torch.Tensor = self.norm(x_TE, residual_TE)
        return hidden

    def _tap(self, layer: int, x_TE: torch.Tensor | None, residual_TE: torch.Tensor) -> None:
        if self.guess_head is not None:
            self.guess_head.taps.take(layer, x_TE, residual_TE)

    def compile_forward(self) -> None:
        """Has torch.compile make all but attention, when a pass first runs. Raises ConfigError for what can't be."""
        if self.group is not None or any(isinstance(each, Linear) and each.adapters for each in self.modules()):
            raise ConfigError("--compile goes neither with --tensor-parallel-size nor --enable-lora: leave one out")
        if self.guess_head is not None:
            raise ConfigError("--compile doesn't go with a head that guesses (eagle3): leave one out")
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
        x_TE, residual_TE, cos_sin = None, self.embed_tokens(input_ids_T), self.rotary.table()
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
        metadata = context.attn_metadata
        only_decodes = isinstance(metadata, AttentionMetadata) and metadata.num_decode_rows == len(residual_TE)
        return only_decodes and few_rows.serves(residual_TE, self._few_rows_products)

    def project(self, hidden_NE: torch.Tensor, out_NV: torch.Tensor | None = None) -> torch.Tensor:
        """[N, E] -> logits [N, V] in the model's dtype; in a group only those of this rank's run of the vocabulary."""
        return linear(hidden_NE, self.lm_head.weight[self._head_rows], None, out_NV)

    def compute_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """[N, E] -> logits fp32 [N, V] of the whole vocabulary."""
        logits = self.project(hidden_NE)
        return (logits if self.group is None else self.group.gather_logits(logits)).float()
