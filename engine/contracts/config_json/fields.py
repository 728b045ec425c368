"""The fields of a config.json, of each architecture that our own modules compute, checked one by one. No torch.

Types and defaults are those that transformers 5 has.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.engine.contracts.rope_config import RopeFields

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "mimo": "MiMoForCausalLM",  # Qwen2, and layers behind the last that guess (engine/models/heads/mtp.py)
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",  # with experts in MXFP4 alone
}
# Fields that change what transformers computes, stores or loads in any architecture -> what the user can do.
REFUSED_IF_SET = {
    "per_layer_config": "layers that differ from each other are not supported",
    "text_config": "models within models are not supported; serve the language model's own checkpoint",
    "text_encoder": "models within models are not supported; serve the language model's own checkpoint",
    "decoder": "models within models are not supported; serve the language model's own checkpoint",
    "generator": "models within models are not supported; serve the language model's own checkpoint",
    "transformers_weights": "weights are read from model.safetensors or its index alone; rename them",
    "configuration_files": "one config.json is read, whatever the version; take the field out",
    "fusion_config": "patched layers are not supported; take the field out",
    "attention_chunk_size": "attention in chunks is not supported",
    "kv_sharing_modes": "layers that share KV are not supported",
}

Size = Annotated[int, Meta(gt=0, lt=1 << 24)]  # any larger would overflow a tensor's bytes
Count = Annotated[int, Meta(gt=0, le=10_000)]
TokenIds = int | list[int] | None


class BlockSparseLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`blocksparse_params` of config.json, a field of our own: each layer's attention follows the pattern that
    BlockSparse (kernels/api/spec.py) describes. `tp_rank` is a rank's own."""

    local_blocks: Count
    vert_stride: Count
    block_size: Size = 64
    head_sliding_step: Annotated[int, Meta(ge=0, le=10_000)] = 0
    tp_rank: Annotated[int, Meta(ge=0, le=0)] = 0


class Fields(RopeFields, kw_only=True):
    """The fields that every architecture has. Those without a default here are in every real checkpoint."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Count
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None  # None: as many as query heads
    head_dim: Size | UnsetType | None = None  # None: hidden_size over query heads
    hidden_act: str = "silu"
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-6
    tie_word_embeddings: bool = False
    is_encoder_decoder: bool = (
        False  # changes nothing in these models; some versions of transformers refuse other types
    )
    dtype: str | None = None
    torch_dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_id: TokenIds = None
    blocksparse_params: BlockSparseLayers | None = None


class LlamaFields(Fields, kw_only=True):
    """Llama's fields."""

    eos_token_id: TokenIds = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None


class MistralFields(Fields, kw_only=True):
    """Mistral's fields: every layer slides."""

    num_key_value_heads: Size = 8
    eos_token_id: TokenIds = 2
    sliding_window: Size | None = 4096
    layer_types: Any = UNSET


class Qwen2Fields(Fields, kw_only=True):
    """The fields of Qwen2, and of MiMo: some layers may slide."""

    num_key_value_heads: Size | None = 32
    head_dim: Size | UnsetType = UNSET
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


class Qwen3Fields(Qwen2Fields, kw_only=True):
    """Qwen3's fields."""

    head_dim: Size = 128
    attention_bias: bool = False


class ExpertFields(Fields, kw_only=True):
    """The fields of a mixture. The number of experts has two names, which transformers takes for one."""

    num_experts: Count | UnsetType = UNSET
    num_local_experts: Count | UnsetType = UNSET
    num_experts_per_tok: Count
    sliding_window: Size | None = None
    layer_types: list[str] | None = None


class MixtralFields(ExpertFields, kw_only=True):
    """Mixtral's fields."""

    default_theta: ClassVar[float] = 1e6
    num_key_value_heads: Size = 8
    num_experts_per_tok: Count = 2
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-5
    eos_token_id: TokenIds = 2


class Qwen3MoeFields(ExpertFields, kw_only=True):
    """The fields of Qwen3 with experts."""

    num_key_value_heads: Size = 4
    head_dim: Size | UnsetType = UNSET
    num_experts_per_tok: Count = 8
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    moe_intermediate_size: Size = 768
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: list[int] | None = None


class GptOssFields(ExpertFields, kw_only=True):
    """GPT-OSS's fields."""

    default_theta: ClassVar[float] = 150000.0
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 64
    num_experts_per_tok: Count = 4
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: Annotated[float, Meta(gt=0)] = 7.0


class DeepseekFields(Fields, kw_only=True):
    """What DeepSeek-V2 and V3 have both. transformers writes `head_dim` itself, and takes other names for counts."""

    head_dim: int | UnsetType | None = UNSET
    attention_bias: bool = False
    kv_lora_rank: Size = 512
    q_lora_rank: Size | None = 1536
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    moe_layer_freq: int = 1
    scoring_func: str | UnsetType = UNSET
    num_experts: int | UnsetType = UNSET
    num_local_experts: int | UnsetType = UNSET
    sliding_window: int | None = None
    layer_types: Any = None


class DeepseekV2Fields(DeepseekFields, kw_only=True):
    """DeepSeek-V2's fields."""

    bos_token_id: int | None = 1
    eos_token_id: TokenIds = 2
    mlp_bias: bool = False
    n_routed_experts: Count = 64
    n_shared_experts: Annotated[int, Meta(ge=1, le=64)] = 2
    num_experts_per_tok: Count
    moe_intermediate_size: Size = 1407
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 0
    topk_method: str = "greedy"
    n_group: Count | None = None
    topk_group: Count | None = None
    routed_scaling_factor: Annotated[float, Meta(ge=0)] = 1.0
    norm_topk_prob: bool | None = False


class DeepseekV3Fields(DeepseekFields, kw_only=True):
    """DeepSeek-V3's fields."""

    num_key_value_heads: Size | None = 128
    bos_token_id: int | None = 0
    eos_token_id: TokenIds = 1
    n_routed_experts: Count = 256
    n_shared_experts: Annotated[int, Meta(ge=1, le=64)] = 1
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Size = 2048
    first_k_dense_replace: Annotated[int, Meta(ge=0)] = 3
    topk_method: str = "noaux_tc"
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: Annotated[float, Meta(ge=0)] = 2.5
    norm_topk_prob: bool = True
    rope_interleave: bool = True


KnownFields = LlamaFields | MistralFields | Qwen2Fields | ExpertFields | DeepseekFields
FIELDS: dict[str, type[KnownFields]] = {
    "llama": LlamaFields,
    "mistral": MistralFields,
    "qwen2": Qwen2Fields,
    "mimo": Qwen2Fields,
    "qwen3": Qwen3Fields,
    "mixtral": MixtralFields,
    "qwen3_moe": Qwen3MoeFields,
    "deepseek_v2": DeepseekV2Fields,
    "deepseek_v3": DeepseekV3Fields,
    "gpt_oss": GptOssFields,
}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def architecture_of(raw: dict[str, Any]) -> str:
    """transformers goes by model_type alone; architectures, where they are named, must say the same."""
    kind, names = raw.get("model_type"), raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"architectures must be a list of names, not {names!r}")
    known = ", ".join(ARCHITECTURES.values())
    if kind is None and names:
        raise ValueError(f"model_type is missing; the architecture is {', '.join(names)}; supported: {known}")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        found = ", ".join(names or []) or "none"
        raise ValueError(f"architecture {found} (model_type {kind}) is not supported; supported: {known}")
    if names and ARCHITECTURES[kind] not in names:
        raise ValueError(f"architecture {', '.join(names)} is not supported with model_type {kind}; supported: {known}")
    return kind


def checked_fields(raw: dict[str, Any], architecture: str) -> KnownFields:
    """The fields of this architecture. Raises ValueError for those that no model here can have."""
    for name, why in REFUSED_IF_SET.items():
        if raw.get(name) is not None:
            raise ValueError(f"{name} is set: {why}")
    if raw.get("is_causal", True) is not True:
        raise ValueError("is_causal is not true: only causal attention is supported")
    fields = msgspec.convert(raw, FIELDS[architecture])
    num_kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if fields.num_attention_heads % num_kv_heads:
        raise ValueError(f"{fields.num_attention_heads} query heads can't share {num_kv_heads} KV heads")
    if fields.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act {fields.hidden_act!r} is not supported; supported: silu")
    return fields
