"""What config.json and generation_config.json say of a model with an encoder: lengths, and how its decoder begins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.generation_config import FILE, read_json_object
from tandem.engine.contracts.wire.parts import EncoderFacts

logger = logging.getLogger(__name__)

NO_LIMIT_LEN = 512  # tokens of either side where the model has no limit of its own; what T5 was trained with
# Fields that change what transformers generates and that a request can ask for itself, or nobody can.
NOT_APPLIED = {
    "num_beams": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "length_penalty": 1.0,
    "forced_eos_token_id": None,
}


def read_encoder(folder: Path, config: PreTrainedConfig, vocab_size: int) -> EncoderFacts:
    """The facts of a model with an encoder. Raises CheckpointError when nothing says how its decoder begins."""
    generation = read_json_object(folder / FILE) or {}

    def said(name: str) -> Any:
        value = generation.get(name)
        return getattr(config, name, None) if value is None else value

    start = said("decoder_start_token_id")
    if not isinstance(start, int) or not 0 <= start < vocab_size:
        raise CheckpointError(f"{folder}: decoder_start_token_id is {start!r}: nothing says how its decoder begins")
    not_applied = [name for name, usual in NOT_APPLIED.items() if said(name) not in (None, usual)]
    if not_applied:
        logger.warning("%s: not applied unless a request asks: %s", folder / FILE, ", ".join(not_applied))
    kind = _kind(config)
    lengths = _lengths(config, kind)
    forced = said("forced_bos_token_id") if kind == "text" else None  # of audio requests say language and task
    return EncoderFacts(
        kind=kind,
        max_positions=lengths[0],
        max_decoder_len=lengths[1],
        prompt=(start,) if forced is None else (start, int(forced)),
        suppressed=_ids([*_single(said("bad_words_ids")), *(said("suppress_tokens") or ())], vocab_size),
        suppressed_first=_ids(said("begin_suppress_tokens") or (), vocab_size),
    )


def _kind(config: Any) -> Any:
    return "audio" if getattr(config, "num_mel_bins", None) else "text"


def _lengths(config: Any, kind: str) -> tuple[int, int]:
    """(positions of the encoder's output, tokens of the decoder)."""
    if kind == "audio":
        return int(config.max_source_positions), int(config.max_target_positions)
    for name in ("max_position_embeddings", "n_positions"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length, length
    return NO_LIMIT_LEN, NO_LIMIT_LEN


def _single(words: Any) -> list[int]:
    """The entries of `bad_words_ids` that are a single token."""
    return [word[0] for word in words or () if len(word) == 1]


def _ids(values: Any, vocab_size: int) -> tuple[int, ...]:
    return tuple(sorted({int(value) for value in values if 0 <= int(value) < vocab_size}))
