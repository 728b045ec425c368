"""How an encoder's input becomes the head of a sequence.

A sequence's first positions, its span, stand for the encoder's output; the decoder's tokens follow. What lies in the
blocks: docs/encoder_decoder.md.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.wire.media import MediaItem, digest_ids
from tandem.engine.contracts.wire.parts import EncoderFacts, span_length


def encoder_input(num_positions: int, arrays: Mapping[str, npt.NDArray]) -> MediaItem:
    """The item that stands for the whole input of an encoder whose output has `num_positions`. `arrays` are the
    encoder's arguments by name: input_ids int64 [1, T], or input_features float32 [1, mel bins, frames]."""
    return MediaItem.of(0, span_length(num_positions), "encoder", dict(arrays))


def sequence_of(item: MediaItem, decoder_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The token ids of a sequence: those that stand for the encoder's input, then the decoder's. Any block's hash
    covers all of the input, since its first positions' ids do: what an encoder makes of a part depends on the rest."""
    return np.concatenate((digest_ids(item.digest, item.length), decoder_ids))


def problem_of_sequence(
    facts: EncoderFacts | None, media: tuple[MediaItem, ...], num_tokens: int, num_prior: int, max_tokens: int
) -> str:
    """The reason why a model with these facts (None: without an encoder) can't compute such a sequence; "" when it can.
    `num_tokens` counts `num_prior` output tokens, as does `max_tokens`."""
    inputs = [item for item in media if item.kind == "encoder"]
    if facts is None:
        return "the model has no encoder" if inputs else ""
    if len(media) != 1 or len(inputs) != 1 or inputs[0].start:
        return "an encoder's input must be all that the prompt begins with"
    name, arrays = ("input_ids", "input_features")[facts.kind == "audio"], inputs[0].arrays()
    if set(arrays) != {name} or arrays[name].shape[:1] != (1,):
        return f"the encoder takes {name} of one input"
    num_positions = arrays[name].shape[-1] if facts.kind == "text" else facts.max_positions
    if not 0 < num_positions <= facts.max_positions or inputs[0].length != span_length(num_positions):
        return f"the encoder takes 1 to {facts.max_positions} tokens, for a span that holds them"
    num_decoder = num_tokens - inputs[0].length - num_prior
    if num_decoder < 1 or num_decoder + max_tokens > facts.max_decoder_len:
        return f"the decoder takes {facts.max_decoder_len} tokens, at least one of them before its output"
    return ""
