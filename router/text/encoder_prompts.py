"""Prompts of models with an encoder: the client's text, or sound, is the encoder's input, and the decoder begins as the
model's configuration says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.encoder import encoder_input
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import EncoderFacts
from tandem.router.text.openai_api import CompletionBody

# What is added to the logit of a token that a model never draws: no other comes near. Unlike `bad_words` it is added on
# the device, and no step waits for the tokens of the one before.
NEVER = -1e9


def check_is_text(body: CompletionBody, facts: EncoderFacts) -> None:
    """Raises InvalidRequestError for what a completion can't have of such a model."""
    if facts.kind == "audio":
        raise InvalidRequestError("the model transcribes sound: ask /v1/audio/transcriptions", param="model")
    if body.echo:
        raise InvalidRequestError(
            "echo: the prompt is the encoder's input, which the output does not follow on", param="echo"
        )
    if body.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs: the prompt is the encoder's input, which has no probabilities", param="prompt_logprobs"
        )


def text_input(token_ids: Sequence[int], facts: EncoderFacts) -> MediaItem:
    """The encoder's input of these tokens. Raises InvalidRequestError when there are too many."""
    if not 0 < len(token_ids) <= facts.max_positions:
        raise InvalidRequestError(
            f"the prompt has {len(token_ids)} tokens; the model's encoder takes 1 to {facts.max_positions}",
            param="prompt",
        )
    return encoder_input(len(token_ids), {"input_ids": np.array([token_ids], np.int64)})


def with_bans(sampling: SamplingParams, facts: EncoderFacts) -> SamplingParams:
    """The same parameters, by which tokens that the model never draws are not drawn."""
    if not facts.suppressed and not facts.suppressed_first:
        return sampling
    bias = {**dict(sampling.logit_bias), **dict.fromkeys(facts.suppressed, NEVER)}
    return msgspec.structs.replace(sampling, logit_bias=tuple(bias.items()), banned_first_ids=facts.suppressed_first)
