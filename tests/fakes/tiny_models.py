"""Tiny random Hugging Face folders for tests, and the greedy tokens that transformers makes with them.

Weights are scaled up from the usual 0.02, so that 64 greedy tokens hold many distinct ones and an error in one KV
slot, position or head changes them; `reference_greedy` reports how sharp that test is.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

VOCAB = 512
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
EXPERTS = {"tie_word_embeddings": False, "num_local_experts": 6, "num_experts_per_tok": 2}
HYBRID = {
    "tie_word_embeddings": False,
    "use_sliding_window": True,
    "sliding_window": 32,
    "max_window_layers": 1,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", *["sliding_attention"] * 3],
}
# name -> (transformers class prefix, config overrides, save_pretrained overrides)
KINDS: dict[str, tuple[str, dict, dict]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}, {}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}, {}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, {}),
    "llama_yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 512,
            }
        },
        {},
    ),
    "llama_sharded": ("Llama", {"attention_bias": True, "mlp_bias": True}, {"max_shard_size": "200KB"}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}, {}),
    "llama_mha": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": False}, {}),
    "mistral": ("Mistral", {"sliding_window": 32, "tie_word_embeddings": False}, {}),
    # Heads that the Hopper kernel takes.
    "llama_64": ("Llama", {"head_dim": 64, "tie_word_embeddings": False}, {}),
    "mistral_64": ("Mistral", {"head_dim": 64, "sliding_window": 32, "tie_word_embeddings": False}, {}),
    "qwen3_64": ("Qwen3", {"head_dim": 64, "tie_word_embeddings": False}, {}),
    "qwen3_hybrid_64": ("Qwen3", {**HYBRID, "head_dim": 64}, {}),
    "llama_deep": ("Llama", {"num_hidden_layers": 10, "tie_word_embeddings": False}, {}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2_hybrid": ("Qwen2", HYBRID, {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": False}, {}),
    "mixtral": ("Mixtral", {**EXPERTS, "intermediate_size": 48, "sliding_window": 32}, {}),
    "mixtral_64": ("Mixtral", {**EXPERTS, "intermediate_size": 64}, {}),  # whole groups of 32 inputs, shared by two
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "moe_intermediate_size": 48, "mlp_only_layers": [1], "norm_topk_prob": True},
        {},
    ),
}


def tiny_model(kind: str, root: Path | None = None) -> Path:
    """Folder of that kind, built on first use and kept for the test session's machine."""
    root = root or Path(tempfile.gettempdir()) / f"tandem-tiny-models-{os.getuid()}-v5"
    return made_once(root / kind, lambda folder: _build(kind, folder))


def made_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, built where it is missing; whole or not there at all, whoever else builds it."""
    if (folder / "tokenizer.json").exists():
        return folder
    scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=_made(folder.parent)))
    build(scratch)
    try:
        os.rename(scratch, folder)
    except OSError:  # another test process was faster
        shutil.rmtree(scratch)
    return folder


def _made(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    return root


def _build(kind: str, folder: Path) -> None:
    import transformers

    prefix, overrides, saving = KINDS[kind]
    config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **overrides})
    torch.manual_seed(sum(kind.encode()))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(sum(kind.encode()))
    tied = config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            base = 0.0 if "norm" not in name else 3.0 if tied and name == "model.norm.weight" else 1.0
            parameter.data = base + 0.2 * torch.randn(parameter.shape, generator=generator)
        else:
            # A tied matrix of size 1 would make each token's best successor that token again.
            matrix = 0.3 if tied else 1.0
            scale = matrix if "embed" in name or "lm_head" in name else 1.6 / parameter.shape[-1] ** 0.5
            parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    model.tie_weights()
    model.save_pretrained(folder, **saving)
    write_tokenizer(folder)


def write_tokenizer(folder: Path, last: tuple[str, ...] = ()) -> None:
    """`last`: special tokens with the last ids of the vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(last),
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([Path(__file__).read_text()] * 2, trainer)
    tokenizer.add_special_tokens(list(last))
    assert not last or tokenizer.token_to_id(last[-1]) == VOCAB - 1
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@dataclass(frozen=True)
class Greedy:
    """What transformers generates. `min_gap`: smallest distance of the two best logits along the way."""

    token_ids: list[int]
    min_gap: float

    @property
    def num_distinct(self) -> int:
        return len(set(self.token_ids))


_models: dict[Path, object] = {}


def reference_model(folder: Path):  # type: ignore[no-untyped-def]
    """transformers' model in fp32 on CPU, kept in memory."""
    if folder not in _models:
        from transformers import AutoModelForCausalLM

        _models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return _models[folder]


def reference_greedy(folder: Path, prompt_token_ids: list[int], num_tokens: int) -> Greedy:
    """Greedy continuation that ignores EOS, by transformers' generate in fp32. Computed once."""
    return _reference_greedy(folder, tuple(prompt_token_ids), num_tokens)


@cache
def _reference_greedy(folder: Path, prompt_token_ids: tuple[int, ...], num_tokens: int) -> Greedy:
    model = reference_model(folder)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([list(prompt_token_ids)]),
            attention_mask=torch.ones(1, len(prompt_token_ids), dtype=torch.long),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    best = torch.stack(out.logits)[:, 0].topk(2).values
    tokens = out.sequences[0, len(prompt_token_ids) :].tolist()
    return Greedy(tokens, float((best[:, 0] - best[:, 1]).min()))


def check_greedy(folder: Path, prompt_token_ids: Sequence[int], token_ids: Sequence[int], num_tokens: int) -> None:
    """Asserts that these are `reference_greedy`'s tokens. In one pass, where generate takes one for each of them: every
    token must be transformers' best after all before it."""
    assert len(token_ids) == num_tokens, f"{len(token_ids)} of {num_tokens} tokens"
    model = reference_model(folder)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt_token_ids, *token_ids]])).logits[0, len(prompt_token_ids) - 1 : -1]
    best = logits.argmax(-1).tolist()
    wrong = [index for index, (token, expected) in enumerate(zip(token_ids, best, strict=True)) if token != expected]
    assert not wrong, f"prompt of {len(prompt_token_ids)}: token {wrong[0]} of {num_tokens} differs"


def random_prompt(length: int, seed: int, vocab_size: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()
