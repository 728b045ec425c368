"""A decoder layer, and what is done to the layers of a model, or of a head beside it, before and after they are filled.

T tokens of the step, R of a step of few rows, E hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.weights.quantisation import MADE, Quantisation
from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.engine.models.layers.latents import LatentSelfAttention
from tandem.engine.models.layers.mlp import MLP
from tandem.engine.models.layers.self_attention import SelfAttention
from tandem.engine.models.mixture_layer import MixtureOfExperts, StackedExperts
from tandem.engine.models.stored_layers import empty_weight
from tandem.engine.parallel.group import TensorParallel
from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.products.rotary_attention import UpToAttention, WantedTokens


class DecoderLayer(nn.Module):
    """Attention and MLP of one layer, each after a norm and added to the residual stream. `hides_first`: nobody attends
    to the first token."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        backend: str,
        group: TensorParallel | None = None,
        *,
        hides_first: bool = False,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, group)
        attention = SelfAttention if config.latents is None else LatentSelfAttention
        self.self_attn: SelfAttention | LatentSelfAttention = attention(config, layer, backend, hides_first=hides_first)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, group)
        mixture = config.mixture
        is_dense = mixture is None or layer in mixture.dense_layers
        self.is_dense_exception = is_dense and mixture is not None
        self._is_whole = group is None  # else what products give are parts of sums
        self.mlp: MLP | MixtureOfExperts
        if is_dense or mixture is None:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, config.mlp_bias)
        else:
            self.mlp = MixtureOfExperts(config.hidden_size, mixture)

    def forward(
        self,
        x_TE: torch.Tensor | UnaddedProduct | None,
        residual_TE: torch.Tensor,
        positions_T: torch.Tensor,
        cos_sin: torch.Tensor,
        wanted: WantedTokens | None = None,
    ) -> tuple[torch.Tensor | UnaddedProduct | None, torch.Tensor]:
        """(what is still to be added to the residual stream, if anything is, the stream). With `wanted`, only those
        tokens."""
        if wanted is None:
            normed = self.input_layernorm.before(self.self_attn.first, x_TE, residual_TE)
            attended = self.self_attn(normed, positions_T, cos_sin, residual_TE if self._is_whole else None)
        else:
            normed_TE: torch.Tensor = self.input_layernorm(x_TE, residual_TE)
            attended = self.self_attn.forward_wanted(normed_TE, positions_T, cos_sin, wanted)
            residual_TE = residual_TE[wanted.index]
        return self._behind_attention(attended, residual_TE)

    def up_to_attention(self, x_TE: torch.Tensor | None, residual_TE: torch.Tensor) -> UpToAttention:
        """The first part of `forward`, without latents; x is added to the residual stream in place."""
        assert isinstance(self.self_attn, SelfAttention)
        normed_TE: torch.Tensor = self.input_layernorm(x_TE, residual_TE)
        return UpToAttention(normed_TE, residual_TE, self.self_attn.keys_and_values(normed_TE))

    def from_attention(
        self, before: UpToAttention, positions_T: torch.Tensor, cos_sin: torch.Tensor, wanted: WantedTokens | None
    ) -> tuple[torch.Tensor | UnaddedProduct | None, torch.Tensor]:
        """The rest of `forward`. `before.kv` is overwritten."""
        assert isinstance(self.self_attn, SelfAttention)
        if wanted is None:
            stream_TE = before.residual if self._is_whole else None
            return self._behind_attention(self.self_attn(before.x, positions_T, cos_sin, stream_TE), before.residual)
        attended = self.self_attn.forward_wanted(before.x, positions_T, cos_sin, wanted, before.kv)
        return self._behind_attention(attended, before.residual[wanted.index])

    def _behind_attention(
        self, attended: torch.Tensor | UnaddedProduct | None, residual_TE: torch.Tensor
    ) -> tuple[torch.Tensor | UnaddedProduct | None, torch.Tensor]:
        product = self.mlp.gate_up_proj if isinstance(self.mlp, MLP) else None
        normed = self.post_attention_layernorm.before(product, attended, residual_TE)
        if isinstance(self.mlp, MLP):
            return self.mlp.product_onto(residual_TE if self._is_whole else None, normed), residual_TE
        return self.mlp(normed), residual_TE

    def store(self, residual_TE: torch.Tensor, positions_T: torch.Tensor, cos_sin: torch.Tensor) -> None:
        """Stores what the cache keeps of tokens with this input, and computes nothing else."""
        self.self_attn.store(self.input_layernorm(residual_TE), positions_T, cos_sin)

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


def quantise_layers(
    layers: nn.Module,
    how: Quantisation,
    architecture: str,
    scale_dtype: torch.dtype,
    device: torch.device | str,
    remedy: str = "",
) -> None:
    """Gives the products of decoder layers quantised weights, uninitialised. `layers`: a list or dictionary of them by
    their numbers. Raises ConfigError, with the remedy, for sizes that have none."""
    for name, module in layers.named_modules():
        if isinstance(module, Linear) and (how.has_plain_layers or how.leaves_out_merged(f"model.layers.{name}")):
            continue
        if how.stored == MADE and name.endswith("kv_b_proj"):  # it would only be made plain again
            continue
        try:
            if isinstance(module, StackedExperts):
                module.quantise(how, f"layers.{name}", architecture, scale_dtype, device)
            elif isinstance(module, Linear):
                module.hold(empty_weight(how, module.out_features, module.in_features, scale_dtype, device))
        except ValueError as error:
            raise ConfigError(f"layers.{name} can't be quantised so: {error}{remedy}") from None


def lay_out(layers: nn.Module, dtype: torch.dtype) -> None:
    """Lays the weights of decoder layers out as the products want them. To be called once, when they are filled."""
    for module in layers.modules():
        if isinstance(module, MLP):
            module.group()
        elif isinstance(module, LatentSelfAttention):
            module.finish_loading(dtype)
        elif isinstance(module, SelfAttention):
            module.finish_loading()
        elif isinstance(module, MixtureOfExperts):
            module.fold_shared()
