"""What a Hugging Face folder says about its model: config.json and generation_config.json, checked. No torch.

Every field is read as transformers 5 reads it, with its types and defaults. Whatever this engine does not compute
exactly is refused by name rather than ignored; tests/unit/engine/contracts/test_config_parity.py holds both against
transformers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from tandem.engine.contracts.config_json.fields import (
    ARCHITECTURES,
    GPT_OSS_ROPE,
    BlockSparseLayers,
    DeepseekFields,
    DeepseekV2Fields,
    DeepseekV3Fields,
    Fields,
    GptOssFields,
    LlamaFields,
    Qwen3Fields,
    Qwen3MoeFields,
    architecture_of,
    checked_fields,
)
from tandem.engine.contracts.config_json.mixture_config import MixtureConfig, mixture_of
from tandem.engine.contracts.config_json.sliding import sliding_layers_of
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.generation_config import eos_token_ids, read_json_object, token_ids
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.contracts.rope_config import RopeConfig, read_rope
from tandem.engine.contracts.weights.quantisation import MXFP4, Quantisation, read_quantisation

__all__ = ["ModelConfig", "RopeConfig", "load_model_config", "resolve_model"]


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention whose heads' keys and values are made of one latent a token (docs/latent_attention.md). Of a head's
    query and key `key_width` elements carry no position, and `rotated` do; `interleaved`: by pairs of neighbours.
    `query_size`: of the latent that queries are made of; None: they are made of hidden states."""

    size: int
    rotated: int
    key_width: int
    value_width: int
    query_size: int | None = None
    interleaved: bool = True

    @property
    def query_width(self) -> int:
        return self.key_width + self.rotated


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder that engine/model can build. Sizes in elements, `window` in tokens (the current one included). With
    `latents` the cache has one head, of `head_dim` elements, whatever the number of query heads."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()  # per layer, empty: all layers alike
    has_sinks: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    blocksparse: BlockSparseLayers | None = None
    quantisation: Quantisation | None = None
    mixture: MixtureConfig | None = None
    latents: LatentConfig | None = None

    @property
    def encoder(self) -> None:
        """The facts of an encoder; None, since this model has only a decoder."""
        return None

    @property
    def latent_size(self) -> int | None:
        """None: keys and values are kept, of each head."""
        return None if self.latents is None else self.latents.size

    @property
    def rotary_size(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim if self.latents is None else self.latents.rotated

    @property
    def attended_size(self) -> int:
        """Elements of what attention gives for a token, all heads together: inputs of the output projection."""
        return self.num_heads * (self.head_dim if self.latents is None else self.latents.value_width)

    @property
    def scale(self) -> float:
        """What scores are multiplied with. Yarn's `mscale_all_dim` makes those of latents larger by the square of the
        temperature of its factor (arXiv 2309.00071)."""
        if self.latents is None:
            return float(self.head_dim**-0.5)
        temperature = 1.0
        if self.rope.mscale_all_dim and self.rope.factor > 1:
            temperature = 0.1 * self.rope.mscale_all_dim * math.log(self.rope.factor) + 1.0
        return float(self.latents.query_width**-0.5) * temperature * temperature

    def window_of(self, layer: int) -> int | None:
        if self.sliding_window is None or (self.sliding_layers and not self.sliding_layers[layer]):
            return None
        return self.sliding_window


def is_native(folder: Path) -> bool:
    """Whether this engine has modules of its own for the folder's model, or nothing says what it is. Raises
    CheckpointError."""
    raw = read_json_object(folder / "config.json") or {}
    kind, given = raw.get("model_type"), raw.get("quantization_config")
    if kind == "gpt_oss":  # its experts in 16 bits, which have biases, no kernel of ours takes
        return isinstance(given, dict) and given.get("quant_method") == MXFP4
    return not isinstance(kind, str) or kind in ARCHITECTURES


def load_model_config(folder: Path) -> ModelConfig:
    """Reads and checks config.json. Raises CheckpointError that names the file, the field and what to do."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():  # transformers, with peft, would load its base model and change that
        raise CheckpointError(
            f"{adapter}: adapters (LoRA and others) are not applied; merge it into its base model (peft's "
            f"merge_and_unload, then save_pretrained) and give that folder, or remove the file if that has been done"
        )
    path = folder / "config.json"
    raw = read_json_object(path)
    if raw is None:
        raise CheckpointError(f"{folder} has no config.json: it is not a model folder in Hugging Face format")
    config = model_config_of(raw, path)
    # An id beyond the vocabulary never comes up, and nothing may look for its logit.
    ends = eos_token_ids(folder) or config.eos_token_ids
    return msgspec.structs.replace(config, eos_token_ids=tuple(one for one in ends if 0 <= one < config.vocab_size))


def model_config_of(raw: dict[str, Any], path: Path) -> ModelConfig:
    """What the object in a config.json says. Raises CheckpointError that names the file and the field."""
    try:
        return _parse(raw)
    except ValueError as error:  # msgspec's own among them
        raise CheckpointError(f"{path}: {error}; repair the file or fetch the model again") from error


def _parse(raw: dict[str, Any]) -> ModelConfig:
    """The model that config.json's object `raw` describes. Raises ValueError that names the field."""
    architecture = architecture_of(raw)
    fields = checked_fields(raw, architecture)
    bias = isinstance(fields, LlamaFields | Qwen3Fields | Qwen3MoeFields | GptOssFields) and fields.attention_bias
    window, layers = sliding_layers_of(fields)
    if isinstance(fields, GptOssFields) and fields.rope_parameters is None:
        fields.rope_parameters = dict(GPT_OSS_ROPE)
    rope, quantisation = read_rope(fields), read_quantisation(raw)
    if (quantisation is not None and quantisation.stored == MXFP4) != isinstance(fields, GptOssFields):
        raise ValueError(
            "of gpt_oss alone, and of that alone, experts are in MXFP4: serve it with --model-impl transformers"
        )
    kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if isinstance(fields, DeepseekFields):
        _check_deepseek(fields, kv_heads, rope)
    if architecture == "mixtral" and rope.rope_type in ("yarn", "llama3") and not fields.head_dim:
        # transformers fails there as well: its Mixtral alone leaves the size of heads to be None.
        raise ValueError(
            f"head_dim is missing beside rope_type {rope.rope_type}: write hidden_size / num_attention_heads"
        )
    return ModelConfig(
        architecture=architecture,
        hidden_size=fields.hidden_size,
        intermediate_size=fields.intermediate_size,
        num_layers=fields.num_hidden_layers,
        num_heads=fields.num_attention_heads,
        num_kv_heads=1 if isinstance(fields, DeepseekFields) else kv_heads,
        head_dim=_head_dim(fields),
        vocab_size=fields.vocab_size,
        max_model_len=_max_model_len(fields, rope),
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        qkv_bias=architecture in ("qwen2", "mimo") or bias,
        o_bias=bias,
        mlp_bias=isinstance(fields, LlamaFields) and fields.mlp_bias,
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        sliding_window=window,
        sliding_layers=layers,
        has_sinks=isinstance(fields, GptOssFields),
        tie_word_embeddings=fields.tie_word_embeddings,
        dtype=_dtype(fields),
        eos_token_ids=token_ids(fields.eos_token_id),
        bos_token_id=fields.bos_token_id,
        blocksparse=fields.blocksparse_params,
        quantisation=quantisation,
        mixture=mixture_of(fields),
        latents=_latents(fields) if isinstance(fields, DeepseekFields) else None,
    )


def _latents(fields: DeepseekFields) -> LatentConfig:
    return LatentConfig(
        size=fields.kv_lora_rank,
        rotated=fields.qk_rope_head_dim,
        key_width=fields.qk_nope_head_dim,
        value_width=fields.v_head_dim,
        query_size=fields.q_lora_rank,
        interleaved=fields.rope_interleave if isinstance(fields, DeepseekV3Fields) else True,
    )


def _check_deepseek(fields: DeepseekFields, num_kv_heads: int, rope: RopeConfig) -> None:
    """Raises ValueError for what our layers don't compute."""
    if num_kv_heads != fields.num_attention_heads:
        raise ValueError(f"num_key_value_heads {num_kv_heads} differs from {fields.num_attention_heads} query heads")
    if fields.attention_bias or (isinstance(fields, DeepseekV2Fields) and fields.mlp_bias):
        raise ValueError("attention_bias and mlp_bias are not supported here: serve it with --model-impl transformers")
    if fields.moe_layer_freq != 1:
        raise ValueError(f"moe_layer_freq {fields.moe_layer_freq} is not supported; supported: 1")
    if rope.rope_type not in ("default", "yarn"):
        raise ValueError(f"rope type {rope.rope_type!r} is not supported for latents; supported: default, yarn")
    if fields.head_dim not in (UNSET, None, fields.qk_rope_head_dim):
        raise ValueError(f"head_dim {fields.head_dim} is not qk_rope_head_dim {fields.qk_rope_head_dim}; take it out")
    if fields.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim {fields.qk_rope_head_dim} is odd; rotary embeddings need an even one")
    if isinstance(fields, DeepseekV2Fields) and fields.hidden_size % fields.num_attention_heads:
        raise ValueError(f"hidden_size {fields.hidden_size} is no multiple of {fields.num_attention_heads} heads")
    by = "sigmoid" if isinstance(fields, DeepseekV3Fields) else "softmax"
    if fields.scoring_func not in (UNSET, by):
        raise ValueError(f"scoring_func {fields.scoring_func!r} is not supported; supported: {by}")
    if not (fields.num_experts is UNSET and fields.num_local_experts is UNSET):
        raise ValueError("num_experts and num_local_experts are other names of n_routed_experts here; take them out")


def _head_dim(fields: Fields) -> int:
    heads = fields.num_attention_heads
    if isinstance(fields, DeepseekFields):
        return fields.kv_lora_rank + fields.qk_rope_head_dim
    if isinstance(fields, LlamaFields) and fields.hidden_size % heads:
        raise ValueError(f"hidden_size {fields.hidden_size} is no multiple of num_attention_heads {heads}")
    given = None if fields.head_dim is UNSET else fields.head_dim
    head_dim = fields.hidden_size // heads if given is None else given
    if head_dim % 2 or head_dim < 2:
        raise ValueError(f"head_dim {head_dim} is odd or 0; rotary embeddings need an even one")
    return head_dim


def _max_model_len(fields: Fields, rope: RopeConfig) -> int:
    length = rope.max_model_len(fields.max_position_embeddings)
    if not 1 <= length < 1 << 31:
        raise ValueError(f"scaled rotary embeddings make the model {length} tokens long")
    return length


def _dtype(fields: Fields) -> str:
    dtype = fields.torch_dtype or "float32" if fields.dtype is None else fields.dtype
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype or repr(dtype)} is not supported; supported: float32, bfloat16, float16")
    return dtype
