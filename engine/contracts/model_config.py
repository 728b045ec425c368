"""What a Hugging Face folder says about its model: config.json and generation_config.json, checked. No torch.

Every field is read as transformers 5 reads it, with its types and defaults. Whatever this engine does not compute
exactly is refused by name rather than ignored; tests/unit/engine/contracts/test_config_parity.py holds both against
transformers.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.generation_config import eos_token_ids, read_json_object, token_ids
from tandem.engine.contracts.model_folder import resolve_model
from tandem.engine.contracts.rope_config import LAYER_TYPES, RopeConfig, RopeFields, read_rope
from tandem.engine.contracts.weights.quantisation import MXFP4, Quantisation, read_quantisation

__all__ = ["ModelConfig", "RopeConfig", "load_model_config", "resolve_model"]

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


class _Fields(RopeFields, kw_only=True):
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


class _Llama(_Fields, kw_only=True):
    eos_token_id: TokenIds = 2
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None


class _Mistral(_Fields, kw_only=True):
    num_key_value_heads: Size = 8
    eos_token_id: TokenIds = 2
    sliding_window: Size | None = 4096
    layer_types: Any = UNSET


class _Qwen2(_Fields, kw_only=True):
    num_key_value_heads: Size | None = 32
    head_dim: Size | UnsetType = UNSET
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 28
    layer_types: list[str] | None = None


class _Qwen3(_Qwen2, kw_only=True):
    head_dim: Size = 128
    attention_bias: bool = False


class _Experts(_Fields, kw_only=True):
    """The fields of a mixture. The number of experts has two names, which transformers takes for one."""

    num_experts: Count | UnsetType = UNSET
    num_local_experts: Count | UnsetType = UNSET
    num_experts_per_tok: Count
    sliding_window: Size | None = None
    layer_types: list[str] | None = None


class _Mixtral(_Experts, kw_only=True):
    default_theta: ClassVar[float] = 1e6
    num_key_value_heads: Size = 8
    num_experts_per_tok: Count = 2
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-5
    eos_token_id: TokenIds = 2


class _Qwen3Moe(_Experts, kw_only=True):
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


class _GptOss(_Experts, kw_only=True):
    default_theta: ClassVar[float] = 150000.0
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 64
    num_experts_per_tok: Count = 4
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-5
    attention_bias: bool = True
    sliding_window: Size | None = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: Annotated[float, Meta(gt=0)] = 7.0


class _Deepseek(_Fields, kw_only=True):
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


class _DeepseekV2(_Deepseek, kw_only=True):
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


class _DeepseekV3(_Deepseek, kw_only=True):
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


FIELDS: dict[str, type[_Llama | _Mistral | _Qwen2 | _Experts | _Deepseek]] = {
    "llama": _Llama,
    "mistral": _Mistral,
    "qwen2": _Qwen2,
    "mimo": _Qwen2,
    "qwen3": _Qwen3,
    "mixtral": _Mixtral,
    "qwen3_moe": _Qwen3Moe,
    "deepseek_v2": _DeepseekV2,
    "deepseek_v3": _DeepseekV3,
    "gpt_oss": _GptOss,
}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


class MixtureConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Layers' MLPs that are mixtures of experts: `width` columns each, of which a token takes the best `top_k`, and
    `shared_width` columns more that all tokens take, of experts that they share. How they are chosen:
    kernels/experts/plans.py, Routing; `has_bias`: checkpoints have one for it, and `exact_scores`: scores are made in
    fp32. `has_biases`: so have what makes scores and the experts' products. `clamp`: alpha and limit of GPT-OSS's gate
    in place of SiLU (the same file's Clamp)."""

    num_experts: int
    top_k: int
    width: int
    renormalises: bool = True
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    by_pairs: bool = False
    factor: float = 1.0
    has_bias: bool = False
    exact_scores: bool = False
    has_biases: bool = False
    clamp: tuple[float, float] | None = None
    shared_width: int = 0
    dense_layers: tuple[int, ...] = ()  # these have an MLP of `intermediate_size` instead
    held: tuple[int, int] | None = None  # the first expert of this rank, and the one after its last; None: all are its
    exchanged: bool = False  # tokens go to the processes that have their experts, each of which has others' tokens, too

    @property
    def own(self) -> range:
        """The experts whose weights are here."""
        return range(*(self.held or (0, self.num_experts)))

    @property
    def num_folded(self) -> int:
        """How many experts as wide as the others the shared columns make, to lie behind them; 0: no whole number, there
        are none, or others' tokens come to those beside them."""
        return 0 if self.exchanged or self.shared_width % self.width else self.shared_width // self.width


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
    architecture = _architecture(raw)
    fields = _checked_fields(raw, architecture)
    bias = isinstance(fields, _Llama | _Qwen3 | _Qwen3Moe | _GptOss) and fields.attention_bias
    window, layers = _sliding(fields)
    if isinstance(fields, _GptOss) and fields.rope_parameters is None:
        fields.rope_parameters = dict(GPT_OSS_ROPE)
    rope, quantisation = read_rope(fields), read_quantisation(raw)
    if (quantisation is not None and quantisation.stored == MXFP4) != isinstance(fields, _GptOss):
        raise ValueError(
            "of gpt_oss alone, and of that alone, experts are in MXFP4: serve it with --model-impl transformers"
        )
    kv_heads = fields.num_key_value_heads or fields.num_attention_heads
    if isinstance(fields, _Deepseek):
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
        num_kv_heads=1 if isinstance(fields, _Deepseek) else kv_heads,
        head_dim=_head_dim(fields),
        vocab_size=fields.vocab_size,
        max_model_len=_max_model_len(fields, rope),
        rms_norm_eps=fields.rms_norm_eps,
        rope=rope,
        qkv_bias=architecture in ("qwen2", "mimo") or bias,
        o_bias=bias,
        mlp_bias=isinstance(fields, _Llama) and fields.mlp_bias,
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        sliding_window=window,
        sliding_layers=layers,
        has_sinks=isinstance(fields, _GptOss),
        tie_word_embeddings=fields.tie_word_embeddings,
        dtype=_dtype(fields),
        eos_token_ids=token_ids(fields.eos_token_id),
        bos_token_id=fields.bos_token_id,
        blocksparse=fields.blocksparse_params,
        quantisation=quantisation,
        mixture=_mixture_of(fields),
        latents=_latents(fields) if isinstance(fields, _Deepseek) else None,
    )


def _mixture_of(fields: _Fields) -> MixtureConfig | None:
    if isinstance(fields, _DeepseekV2 | _DeepseekV3):
        return _deepseek_mixture(fields)
    return _mixture(fields) if isinstance(fields, _Experts) else None


def _latents(fields: _Deepseek) -> LatentConfig:
    return LatentConfig(
        size=fields.kv_lora_rank,
        rotated=fields.qk_rope_head_dim,
        key_width=fields.qk_nope_head_dim,
        value_width=fields.v_head_dim,
        query_size=fields.q_lora_rank,
        interleaved=fields.rope_interleave if isinstance(fields, _DeepseekV3) else True,
    )


def _check_deepseek(fields: _Deepseek, num_kv_heads: int, rope: RopeConfig) -> None:
    """Raises ValueError for what our layers don't compute."""
    if num_kv_heads != fields.num_attention_heads:
        raise ValueError(f"num_key_value_heads {num_kv_heads} differs from {fields.num_attention_heads} query heads")
    if fields.attention_bias or (isinstance(fields, _DeepseekV2) and fields.mlp_bias):
        raise ValueError("attention_bias and mlp_bias are not supported here: serve it with --model-impl transformers")
    if fields.moe_layer_freq != 1:
        raise ValueError(f"moe_layer_freq {fields.moe_layer_freq} is not supported; supported: 1")
    if rope.rope_type not in ("default", "yarn"):
        raise ValueError(f"rope type {rope.rope_type!r} is not supported for latents; supported: default, yarn")
    if fields.head_dim not in (UNSET, None, fields.qk_rope_head_dim):
        raise ValueError(f"head_dim {fields.head_dim} is not qk_rope_head_dim {fields.qk_rope_head_dim}; take it out")
    if fields.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim {fields.qk_rope_head_dim} is odd; rotary embeddings need an even one")
    if isinstance(fields, _DeepseekV2) and fields.hidden_size % fields.num_attention_heads:
        raise ValueError(f"hidden_size {fields.hidden_size} is no multiple of {fields.num_attention_heads} heads")
    by = "sigmoid" if isinstance(fields, _DeepseekV3) else "softmax"
    if fields.scoring_func not in (UNSET, by):
        raise ValueError(f"scoring_func {fields.scoring_func!r} is not supported; supported: {by}")
    if not (fields.num_experts is UNSET and fields.num_local_experts is UNSET):
        raise ValueError("num_experts and num_local_experts are other names of n_routed_experts here; take them out")


def _deepseek_mixture(fields: _DeepseekV2 | _DeepseekV3) -> MixtureConfig | None:
    """None: all layers are dense. Raises ValueError."""
    num_experts, is_v3 = fields.n_routed_experts, isinstance(fields, _DeepseekV3)
    methods = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if fields.topk_method not in methods:
        raise ValueError(f"topk_method {fields.topk_method!r} is not supported; supported: {', '.join(methods)}")
    if not is_v3 and fields.norm_topk_prob:
        raise ValueError("norm_topk_prob is not supported for deepseek_v2: take it out")
    in_groups = fields.topk_method != "greedy"
    groups, kept = (fields.n_group or 0, fields.topk_group or 0) if in_groups else (1, 1)
    if not 0 < kept <= groups or num_experts % groups or (is_v3 and num_experts // groups < 2):
        raise ValueError(f"n_group {groups} and topk_group {kept} don't cut {num_experts} experts into groups")
    if fields.num_experts_per_tok > num_experts // groups * kept:
        raise ValueError(f"num_experts_per_tok {fields.num_experts_per_tok} is more than topk_group's experts")
    dense = min(fields.first_k_dense_replace, fields.num_hidden_layers)
    if dense == fields.num_hidden_layers:
        return None
    return MixtureConfig(
        num_experts=num_experts,
        top_k=fields.num_experts_per_tok,
        width=fields.moe_intermediate_size,
        renormalises=is_v3 and bool(fields.norm_topk_prob),
        scores="sigmoid" if is_v3 else "softmax",
        groups=groups,
        kept_groups=kept,
        by_pairs=is_v3,
        factor=fields.routed_scaling_factor,
        has_bias=is_v3,
        exact_scores=True,
        shared_width=fields.n_shared_experts * fields.moe_intermediate_size,
        dense_layers=tuple(range(dense)),
    )


def _checked_fields(raw: dict[str, Any], architecture: str) -> _Llama | _Mistral | _Qwen2 | _Experts | _Deepseek:
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


def _mixture(fields: _Experts) -> MixtureConfig:
    """The mixture that these fields describe. Raises ValueError for numbers that contradict each other."""
    named = {count for count in (fields.num_experts, fields.num_local_experts) if count is not UNSET}
    if len(named) > 1:
        raise ValueError("num_experts and num_local_experts differ; take one of them out")
    num_experts = named.pop() if named else 8 if isinstance(fields, _Mixtral) else 128
    assert isinstance(num_experts, int)
    if fields.num_experts_per_tok > num_experts:
        raise ValueError(f"num_experts_per_tok {fields.num_experts_per_tok} is more than the {num_experts} experts")
    if not isinstance(fields, _Qwen3Moe):
        plain = MixtureConfig(num_experts=num_experts, top_k=fields.num_experts_per_tok, width=fields.intermediate_size)
        if not isinstance(fields, _GptOss):
            return plain
        return msgspec.structs.replace(plain, has_biases=True, clamp=(fields.swiglu_alpha, fields.swiglu_limit))
    step, dense = fields.decoder_sparse_step, set(fields.mlp_only_layers or ())
    return MixtureConfig(
        num_experts=num_experts,
        top_k=fields.num_experts_per_tok,
        width=fields.moe_intermediate_size,
        renormalises=fields.norm_topk_prob,
        dense_layers=tuple(i for i in range(fields.num_hidden_layers) if i in dense or (i + 1) % step),
    )


def _architecture(raw: dict[str, Any]) -> str:
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


def _head_dim(fields: _Fields) -> int:
    heads = fields.num_attention_heads
    if isinstance(fields, _Deepseek):
        return fields.kv_lora_rank + fields.qk_rope_head_dim
    if isinstance(fields, _Llama) and fields.hidden_size % heads:
        raise ValueError(f"hidden_size {fields.hidden_size} is no multiple of num_attention_heads {heads}")
    given = None if fields.head_dim is UNSET else fields.head_dim
    head_dim = fields.hidden_size // heads if given is None else given
    if head_dim % 2 or head_dim < 2:
        raise ValueError(f"head_dim {head_dim} is odd or 0; rotary embeddings need an even one")
    return head_dim


def _max_model_len(fields: _Fields, rope: RopeConfig) -> int:
    length = rope.max_model_len(fields.max_position_embeddings)
    if not 1 <= length < 1 << 31:
        raise ValueError(f"scaled rotary embeddings make the model {length} tokens long")
    return length


def _dtype(fields: _Fields) -> str:
    dtype = fields.torch_dtype or "float32" if fields.dtype is None else fields.dtype
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype {dtype or repr(dtype)} is not supported; supported: float32, bfloat16, float16")
    return dtype


def _sliding(fields: _Llama | _Mistral | _Qwen2 | _Experts | _Deepseek) -> tuple[int | None, tuple[bool, ...]]:
    """The window in tokens, and for each layer whether it has the window (empty: all do). Raises ValueError."""
    if isinstance(fields, _Deepseek):
        if fields.sliding_window is not None or fields.layer_types is not None:
            raise ValueError(
                "sliding windows are not supported beside latents; take sliding_window and layer_types out"
            )
        return None, ()
    if isinstance(fields, _Mistral):
        if fields.layer_types is not UNSET:
            raise ValueError("layer_types makes a mistral model a ministral one, which is not supported")
        return fields.sliding_window, ()
    if isinstance(fields, _GptOss):
        return fields.sliding_window, _alternating(fields)
    if isinstance(fields, _Experts):
        if fields.layer_types is not None:
            raise ValueError("layer_types is not supported beside experts: all layers attend alike; take it out")
        return None if isinstance(fields, _Qwen3Moe) and not fields.use_sliding_window else fields.sliding_window, ()
    types, num_layers = fields.layer_types, fields.num_hidden_layers
    if types is not None and (len(types) != num_layers or not set(types) <= set(LAYER_TYPES)):
        raise ValueError(f"layer_types must say {' or '.join(LAYER_TYPES)} {num_layers} times")
    slides = types is not None and "sliding_attention" in types
    if isinstance(fields, _Llama):
        # transformers would cut such a model's cache by the window, but not its prompt's attention.
        window = fields.sliding_window
        if slides or (window is not None and window < fields.max_position_embeddings):
            raise ValueError("a sliding window is not supported for llama; take sliding_window and layer_types out")
        return None, ()
    window = fields.sliding_window if fields.use_sliding_window else None
    if window is None:
        if slides:
            raise ValueError("layer_types names sliding_attention, but use_sliding_window or sliding_window is not set")
        return None, ()
    if types is not None:
        return window, tuple(kind == "sliding_attention" for kind in types)
    return window, tuple(layer >= fields.max_window_layers for layer in range(num_layers))


def _alternating(fields: _GptOss) -> tuple[bool, ...]:
    """For each layer whether it has the window: every second, from the first on, where nothing else is said. Raises
    ValueError."""
    num_layers, types = fields.num_hidden_layers, fields.layer_types
    if types is None:
        types = [LAYER_TYPES[1 - layer % 2] for layer in range(num_layers)]
    if len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
        raise ValueError(f"layer_types must say {' or '.join(LAYER_TYPES)} {num_layers} times")
    if fields.sliding_window is None:
        raise ValueError("sliding_window is not set, without which transformers builds no gpt_oss; name it")
    return tuple(kind == "sliding_attention" for kind in types)
