"""Tiny random folders of architectures that run by transformers' modules, one of each family."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

import torch

from tiny_models import VOCAB, made_once, write_tokenizer

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 96}
EXPERTS = {**GROUPED, "head_dim": 16, "num_experts_per_tok": 2}
MLA = {
    **GROUPED,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
# model_type -> config. Windows and chunks are shorter than the prompts of tests.
FAMILIES: dict[str, dict] = {
    "gpt2": {**SIZES, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 2048},
    "bloom": {**SIZES, "n_layer": 4, "n_head": 4, "seq_length": 2048},
    "mpt": {**SIZES, "max_seq_len": 2048, "attn_config": {"clip_qkv": 0.5}},
    "falcon": {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
    "opt": {**SIZES, "ffn_dim": 96, "word_embed_proj_dim": 48},
    "gpt_neox": {**SIZES, "intermediate_size": 96},
    "phi": GROUPED,
    "phi3": {**GROUPED, "sliding_window": 30},
    "gemma2": {
        **GROUPED,
        "head_dim": 16,
        "sliding_window": 21,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 9.0,
        "query_pre_attn_scalar": 20,
    },
    "gemma3_text": {
        **GROUPED,
        "head_dim": 16,
        "sliding_window": 21,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma3_deep": {
        **GROUPED,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": 21,
        "num_hidden_layers": 20,
        "layer_types": [*[*["sliding_attention"] * 5, "full_attention"] * 3, *["sliding_attention"] * 2],
    },
    "starcoder2": {**GROUPED, "sliding_window": 40},
    "cohere2": {**GROUPED, "sliding_window": 21, "head_dim": 16, "logit_scale": 0.5},
    "olmo2": GROUPED,
    "granite": {**GROUPED, "attention_multiplier": 0.3, "logits_scaling": 3.0},
    "smollm3": {**GROUPED, "no_rope_layers": [1, 0, 1, 0]},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32},
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1},
    "gpt_oss": {
        **EXPERTS,
        "intermediate_size": 128,  # two ranks have whole groups of 32
        "num_local_experts": 4,
        "sliding_window": 21,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gemma3": {
        "text_config": {
            **GROUPED,
            "head_dim": 16,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
        "image_token_index": 500,
        "boi_token_index": 501,
        "eoi_token_index": 502,
    },
    "llama4_text": {
        **EXPERTS,
        "intermediate_size_mlp": 96,
        "num_local_experts": 4,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.5,
    },
    "deepseek_v2": {
        **MLA,
        "q_lora_rank": None,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "mscale": 0.7,
            "mscale_all_dim": 0.9,
            "original_max_position_embeddings": 512,
        },
    },
    "deepseek_v3": MLA,
    "glm4_moe_lite": MLA,
}
# DeepSeek with V2-Lite's real heads and latents, which choose kernels: for tests on GPUs.
_REAL_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 8192,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "moe_intermediate_size": 64,
}
REAL_HEADS: dict[str, dict] = {
    "deepseek_v2_real_heads": {
        **FAMILIES["deepseek_v2"],
        **_REAL_SIZES,
        "model_type": "deepseek_v2",
        "rope_parameters": {**FAMILIES["deepseek_v2"]["rope_parameters"], "original_max_position_embeddings": 2048},
    },
    "deepseek_v3_real_heads": {**MLA, **_REAL_SIZES, "model_type": "deepseek_v3", "q_lora_rank": 128},
}
# Models with towers; spans are as tests/fakes/tiny_media.py makes them.
TOWERS: dict[str, dict] = {
    "llava": {
        "text_config": {**GROUPED, "model_type": "llama"},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 7,
            "projection_dim": 16,
        },
        "image_token_id": 500,
        "image_seq_length": 16,
    },
    "qwen2_5_vl": {
        "text_config": {
            **GROUPED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": 64,
            "patch_size": 7,
            "window_size": 28,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 500,
        "video_token_id": 501,
        "vision_start_token_id": 502,
        "vision_end_token_id": 503,
    },
    "qwen2_audio": {
        "text_config": {**GROUPED, "model_type": "qwen2"},
        "audio_config": {
            "model_type": "qwen2_audio_encoder",
            "d_model": 16,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 16,
            "num_mel_bins": 16,
            "max_source_positions": 50,
        },
        "audio_token_index": 500,
    },
}
# The last tokens of their vocabularies, from PLACEHOLDER of tiny_media on.
MARKS = {
    "llava": ("<image>", *(f"<unused{i}>" for i in range(11))),
    "qwen2_5_vl": (
        *("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"),
        *(f"<unused{i}>" for i in range(8)),
    ),
    "qwen2_audio": ("<|AUDIO|>", *(f"<unused{i}>" for i in range(11))),
}
_IMAGES: dict = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}
PROCESSORS: dict[str, dict] = {
    "llava": {
        **_IMAGES,
        "image_processor_type": "CLIPImageProcessor",
        "size": {"shortest_edge": 28},
        "crop_size": {"height": 28, "width": 28},
    },
    "qwen2_5_vl": {
        **_IMAGES,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 7,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 784, "longest_edge": 7840},
    },
    "qwen2_audio": {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 16,
        "chunk_length": 1,
        "n_samples": 16000,
        "nb_max_frames": 100,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": 16000,
    },
}
_PARTS = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}MARK{% else %}{{ c['text'] }}{% endif %}{% endfor %}\n{% endfor %}assistant:"
)
TEMPLATES = {
    "llava": _PARTS.replace("MARK", "<image>"),
    "qwen2_5_vl": _PARTS.replace("MARK", "<|vision_start|><|image_pad|><|vision_end|>"),
    # One that takes text alone, so that placeholders are put into it.
    "qwen2_audio": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
}
# What transformers runs without calling for attention, or not from all layers.
REFUSED: dict[str, dict] = {
    "qwen3_next": {
        **EXPERTS,
        "num_experts": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
    "mamba": {**SIZES, "state_size": 8},
}


def tiny_hf_model(family: str) -> Path:
    """Folder of that family, built on first use and kept for as long as what it is made of stays so."""
    made_of = [_config_of(family), PROCESSORS.get(family), TEMPLATES.get(family), MARKS.get(family)]
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:8]
    root = Path(tempfile.gettempdir()) / f"tandem-tiny-hf-models-{os.getuid()}-v3"
    return made_once(root / f"{family}-{digest}", lambda folder: _build(family, folder))


def _config_of(family: str) -> dict:
    return {**FAMILIES, **REFUSED, **TOWERS, **REAL_HEADS}[family]


def _build(family: str, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

    fields = dict(_config_of(family))
    config = AutoConfig.for_model(fields.pop("model_type", family), **fields)
    torch.manual_seed(0)
    model = (AutoModelForMultimodalLM if family in TOWERS else AutoModelForCausalLM).from_config(config)
    generator = torch.Generator().manual_seed(sum(family.encode()))
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.2 * noise  # norms are 1 or, where 1 is added, 0
        else:
            tied = 0.3 if getattr(config, "tie_word_embeddings", False) else 1.0
            is_table = any(word in name for word in ("embed", "lm_head", "wte", "wpe"))
            parameter.data = noise * (tied if is_table else 1.6 / parameter.shape[-1] ** 0.5)
    model.tie_weights()
    model.save_pretrained(folder)
    write_tokenizer(folder, MARKS.get(family, ()))
    if family in TOWERS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
        (folder / "chat_template.jinja").write_text(TEMPLATES[family])
