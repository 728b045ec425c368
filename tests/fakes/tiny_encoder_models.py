"""Tiny random folders of models with an encoder, and the check that tokens are those that transformers would choose."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tandem.engine.contracts.wire.encoder import encoder_input, sequence_of
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import EncoderFacts
from tiny_models import VOCAB, made_once, write_tokenizer

START = 1
LENGTH = 160  # of either side
BART = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "decoder_start_token_id": START,
    "forced_eos_token_id": None,
    "tie_word_embeddings": False,
}
AUDIO_POSITIONS, MEL_BINS = 50, 16
RATE = 100 * AUDIO_POSITIONS  # of a second's samples, which is a window
HEARS = {"feature_size": MEL_BINS, "sampling_rate": RATE, "hop_length": 50, "n_fft": 400, "chunk_length": 1}
SAYS = {
    "lang_to_id": {"<|en|>": 500, "<|de|>": 501},
    "task_to_id": {"transcribe": 502, "translate": 503},
    "no_timestamps_token_id": 504,
    "prev_sot_token_id": 505,
    "suppress_tokens": list(range(60, 120)),
    "begin_suppress_tokens": [1, 220],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
    "marian": BART,
    "whisper": {
        **BART,
        "num_mel_bins": MEL_BINS,
        "max_source_positions": AUDIO_POSITIONS,
        "max_target_positions": LENGTH,
        "begin_suppress_tokens": None,
    },
}


def tiny_encoder_model(family: str) -> Path:
    """Folder of that family, built on first use and kept for the test session's machine."""
    root = Path(tempfile.gettempdir()) / f"tandem-tiny-encoder-models-{os.getuid()}-v2"
    return made_once(root / family, lambda folder: _build(family, folder))


def _class_of(config: Any) -> Any:
    from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    return AutoModelForSpeechSeq2Seq if config.model_type == "whisper" else AutoModelForSeq2SeqLM


def _build(family: str, folder: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **FAMILIES[family])
    torch.manual_seed(0)
    model = _class_of(config).from_config(config)
    generator = torch.Generator().manual_seed(sum(family.encode()))
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.2 * noise
        elif any(word in name for word in ("embed", "shared", "lm_head", "proj_out")):
            parameter.data = noise
        else:
            parameter.data = noise * _gain(name) / parameter[0].numel() ** 0.5
    model.tie_weights()
    model.save_pretrained(folder)
    write_tokenizer(folder)
    if family == "whisper":
        (folder / "preprocessor_config.json").write_text(json.dumps(HEARS))
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **SAYS}))


def _gain(name: str) -> float:
    """Attention is sharp and adds little: what is averaged over many tokens would make each output like the last."""
    if "q_proj" in name or name.endswith((".q.weight", ".k.weight")):
        return 9.6 if "q_proj" in name else 3.0
    if "encoder_attn.out_proj" in name:
        return 0.6
    return 0.5 if "out_proj" in name or "fc2" in name else 1.6


@cache
def reference(folder: Path) -> Any:
    """transformers' model in fp32 on CPU, kept in memory."""
    from transformers import AutoConfig

    return _class_of(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()


def text_input(token_ids: Sequence[int]) -> MediaItem:
    return encoder_input(len(token_ids), {"input_ids": np.array([token_ids], np.int64)})


def audio_input(seed: int) -> MediaItem:
    features = np.random.default_rng(seed).standard_normal((1, MEL_BINS, 2 * AUDIO_POSITIONS), np.float32)
    return encoder_input(AUDIO_POSITIONS, {"input_features": features})


def sequence(item: MediaItem, facts: EncoderFacts, more: Sequence[int] = ()) -> list[int]:
    """The prompt of a Submit: the input's span, and how the decoder begins."""
    return sequence_of(item, np.array([*facts.prompt, *more], np.int32)).tolist()


def check_greedy(folder: Path, item: MediaItem, decoder_prompt: Sequence[int], token_ids: Sequence[int]) -> None:
    """Asserts that every token is transformers' best after all before it."""
    arguments = {name: torch.from_numpy(array.copy()) for name, array in item.arrays().items()}
    ids = torch.tensor([[*decoder_prompt, *token_ids]])
    with torch.inference_mode():
        logits = reference(folder)(**arguments, decoder_input_ids=ids).logits[0, len(decoder_prompt) - 1 : -1]
    wrong = np.flatnonzero(logits.argmax(-1).numpy() != np.array(token_ids))
    assert not wrong.size, f"token {wrong[0]} of {len(token_ids)} differs"
