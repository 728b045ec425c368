"""Small random models that pool, in folders as they are found on the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "reads", "cats", "in", "paris")
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
DECODER = {"num_key_value_heads": 1, "head_dim": 16}
KINDS: dict[str, Any] = {
    "bert": (transformers.BertConfig, transformers.BertModel, {"type_vocab_size": 2}),
    "xlm-roberta": (transformers.XLMRobertaConfig, transformers.XLMRobertaModel, {"type_vocab_size": 1}),
    "modernbert": (transformers.ModernBertConfig, transformers.ModernBertModel, {"local_attention": 8}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {**DECODER, "matryoshka_dimensions": [8, 16]}),
    "mistral": (transformers.MistralConfig, transformers.MistralModel, DECODER),
}
SCORERS = {
    "bert": transformers.BertForSequenceClassification,
    "modernbert": transformers.ModernBertForSequenceClassification,
}


def make_pooling_model(folder: Path, kind: str, scores: bool = False, num_labels: int = 1) -> Path:
    """A model that embeds, or with `scores` a cross-encoder with that many labels."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if kind == "bert" else "[CLS] $A [SEP] [SEP] $B [SEP]",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    says = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(says))
    make_config, model, more = KINDS[kind]
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    config = make_config(
        vocab_size=len(vocabulary), max_position_embeddings=48, num_labels=num_labels, **ids, **SIZES, **more
    )
    torch.manual_seed(5)
    made = SCORERS[kind](config) if scores else model(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    made.save_pretrained(folder)
    return folder


def add_sentence_transformers(folder: Path, mode: str, normalize: bool) -> None:
    """What says how its vectors are made."""
    parts = ["Transformer", "Pooling", *["Normalize"] * normalize]
    types = [
        {"idx": i, "name": str(i), "path": f"{i}_{part}" if i else "", "type": f"sentence_transformers.models.{part}"}
        for i, part in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(types))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
