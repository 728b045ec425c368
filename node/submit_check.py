"""Checks every Submit before anything else looks at it, so that no Submit, however wrong, can end a node.

Everything that is used as an index, a count, a size or a point in time is bounded here, so that nothing behind has to.
Limits that are no property of the model are far beyond those of the router's API.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.encoder import problem_of_sequence
from tandem.engine.contracts.wire.media import problem_of_media
from tandem.engine.contracts.wire.parts import EncoderFacts, PeerRef
from tandem.engine.contracts.wire.requests import Submit
from tandem.engine.structured.grammars import MAX_GRAMMAR_BYTES

MAX_ID_CHARS = 512  # a guess, as the next: far above what routers send
MAX_SALT_BYTES = 64  # a guess, as the next
MAX_CONTEXT_BYTES = 64
MAX_SAMPLES = 4096  # a guess
MAX_LOGPROBS = 256  # a guess
MAX_BANNED_IDS = 1 << 18  # a guess
MAX_WIDTH = 128  # beams; a guess
MAX_LENGTH_PENALTY = 16  # a guess: powers of lengths stay numbers
MAX_SECONDS = 1e9  # a guess: decades
INT32 = 1 << 31
INT64 = 1 << 64


def problem_of(
    submit: Submit,
    vocab_size: int,
    max_model_len: int,
    media_kinds: frozenset[str] = frozenset(),
    encoder: EncoderFacts | None = None,
) -> str:
    """The reason why this node can't take `submit`, in words for its sender; "" when it can."""
    for problem in (
        _problems_of_name(submit),
        _problems_of_prompt(submit, vocab_size, max_model_len),
        _problems_of_media(submit, media_kinds),
        _problems_of_encoder(submit, encoder),
        _problems_of_sampling(submit.sampling, vocab_size),
        _problems_of_place(submit),
    ):
        found = next(filter(None, problem), "")
        if found:
            return found
    return ""


def _problems_of_name(submit: Submit) -> Iterator[str]:
    if not 0 < len(submit.request_id) <= MAX_ID_CHARS:
        yield f"request_id must have 1 to {MAX_ID_CHARS} characters"
    if not 0 <= submit.attempt < INT32:
        yield "attempt must lie in [0, 2^31)"
    if not -INT32 <= submit.priority < INT32:
        yield "priority must lie in [-2^31, 2^31)"
    if not 0 <= submit.deadline_s <= MAX_SECONDS:  # not for NaN, either
        yield f"deadline_s must lie in [0, {MAX_SECONDS:g}]"
    if len(submit.salt) > MAX_SALT_BYTES:
        yield f"salt must have at most {MAX_SALT_BYTES} bytes"
    if submit.adapter is not None and not (submit.context and submit.adapter.digest):
        yield "an adapter needs a digest and a context, or its KV would be taken for the model's own"
    if len(submit.context) > MAX_CONTEXT_BYTES:
        yield f"context must have at most {MAX_CONTEXT_BYTES} bytes"
    if not 0 <= submit.cache_share <= 1:
        yield "cache_share must lie in [0, 1]"


def _problems_of_prompt(submit: Submit, vocab_size: int, max_model_len: int) -> Iterator[str]:
    num_tokens, rest = divmod(len(submit.prompt_token_ids), 4)
    if rest or not num_tokens:
        yield "prompt_token_ids must hold at least one int32"
    if num_tokens >= max_model_len:
        yield f"the prompt has {num_tokens} tokens; with one output token the model takes {max_model_len}"
    token_ids = np.frombuffer(submit.prompt_token_ids, "<i4")
    if token_ids.max() >= vocab_size or (token_ids.min() < 0 and not submit.media):
        yield f"a prompt token id is outside of [0, {vocab_size})"
    if not 0 <= submit.num_prior_output_tokens < num_tokens:
        yield "num_prior_output_tokens must leave at least one prompt token"
    if submit.num_prior_output_tokens and submit.sampling.beam_width:
        yield "beams are searched from the prompt's end: there is no prior output"
    if submit.num_prior_output_tokens >= submit.sampling.max_tokens:
        yield "max_tokens, which counts prior output, must leave at least one token"
    if not 0 <= submit.num_public_tokens <= num_tokens:
        yield "num_public_tokens must be a part of the prompt"
    samples = submit.sample_indices
    if not 0 < len(samples) <= MAX_SAMPLES or len(set(samples)) != len(samples):
        yield f"sample_indices must be distinct, 1 to {MAX_SAMPLES} of them"
    if not all(0 <= index < INT32 for index in samples):
        yield "sample_indices must lie in [0, 2^31)"


def _problems_of_media(submit: Submit, media_kinds: frozenset[str]) -> Iterator[str]:
    if not submit.media:
        return
    for item in submit.media:
        if item.kind not in media_kinds:
            yield f"the model takes no {item.kind} input"
    if submit.num_public_tokens > submit.media[0].start:
        yield "a prompt's public tokens are text"
    end_of_media, token_ids = submit.media[-1].end, np.frombuffer(submit.prompt_token_ids, "<i4")
    if end_of_media > len(token_ids) - submit.num_prior_output_tokens:
        yield "prior output holds no media"
    yield problem_of_media(submit.media, token_ids)


def _problems_of_encoder(submit: Submit, encoder: EncoderFacts | None) -> Iterator[str]:
    num_tokens, max_tokens = len(submit.prompt_token_ids) // 4, submit.sampling.max_tokens
    yield problem_of_sequence(encoder, submit.media, num_tokens, submit.num_prior_output_tokens, max_tokens)
    if encoder is not None and submit.sampling.num_prompt_logprobs is not None:
        yield "a model with an encoder has no log-probabilities of its prompt"


def _problems_of_sampling(params: SamplingParams, vocab_size: int) -> Iterator[str]:
    if not 1 <= params.max_tokens < INT32 or not 0 <= params.min_tokens < INT32:
        yield "max_tokens must lie in [1, 2^31), min_tokens in [0, 2^31)"
    if not 0 <= params.temperature < math.inf:
        yield "temperature must be a number, 0 or more"
    if not -1 <= params.top_k < INT32 or not 0 < params.top_p <= 1 or not 0 <= params.min_p <= 1:
        yield "top_k must lie in [-1, 2^31), top_p in (0, 1], min_p in [0, 1]"
    if not 0 < params.repetition_penalty < math.inf:
        yield "repetition_penalty must be a number above 0"
    if not math.isfinite(params.presence_penalty) or not math.isfinite(params.frequency_penalty):
        yield "presence_penalty and frequency_penalty must be numbers"
    if not 0 <= params.seed < INT64:
        yield "seed must lie in [0, 2^64)"
    for name, number in (("num_logprobs", params.num_logprobs), ("num_prompt_logprobs", params.num_prompt_logprobs)):
        if number is not None and not 0 <= number <= MAX_LOGPROBS:
            yield f"{name} must lie in [0, {MAX_LOGPROBS}]"
    if max(len(params.logit_bias), len(params.stop_token_ids), len(params.allowed_token_ids)) > vocab_size:
        yield "logit_bias, stop_token_ids, allowed_token_ids must not hold more ids than the vocabulary"
    if not 0 <= params.beam_width <= MAX_WIDTH or not abs(params.length_penalty) <= MAX_LENGTH_PENALTY:
        yield f"beam_width must lie in [0, {MAX_WIDTH}], length_penalty within {MAX_LENGTH_PENALTY} of 0"
    if params.beam_width and not (params.greedy and _has_no_penalty(params)):
        yield "beams are searched at temperature 0 and without penalties"
    if not all(0 <= token_id < vocab_size for token_id, _ in params.logit_bias):
        yield f"a token id of logit_bias is outside of [0, {vocab_size})"
    if not all(math.isfinite(value) for _, value in params.logit_bias):
        yield "a value of logit_bias is not a number"
    if len(params.grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
        yield f"grammar must have at most {MAX_GRAMMAR_BYTES} bytes"
    if not all(0 <= token_id < vocab_size for token_id in params.stop_token_ids):
        yield f"a stop token id is outside of [0, {vocab_size})"
    if not all(0 <= token_id < vocab_size for token_id in params.allowed_token_ids):
        yield f"one of allowed_token_ids is outside of [0, {vocab_size})"
    if sum(map(len, params.bad_words)) > MAX_BANNED_IDS or not all(params.bad_words):
        yield f"bad_words must not be empty, nor hold more than {MAX_BANNED_IDS} ids in all"
    if not all(0 <= token_id < vocab_size for word in params.bad_words for token_id in word):
        yield f"a token id of bad_words is outside of [0, {vocab_size})"
    if len(params.banned_first_ids) > vocab_size or not all(0 <= each < vocab_size for each in params.banned_first_ids):
        yield f"banned_first_ids must lie in [0, {vocab_size}), and be no more"


def _has_no_penalty(params: SamplingParams) -> bool:
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)


def _problems_of_place(submit: Submit) -> Iterator[str]:
    """What is wrong with the peers that a Submit names."""
    if submit.peer is None and submit.mode != "full":
        yield f"mode {submit.mode} needs a peer"
    if submit.is_precise and submit.mode != "full":
        yield "is_precise is for mode full"
    if submit.is_running and (submit.mode != "decode" or len(submit.sample_indices) != 1):
        yield "is_running is for mode decode and one sample"
    if submit.peer is not None and not _is_name(submit.peer):
        yield "peer must name a node and an epoch of 64 bits"
    if submit.prefix is not None and not (_is_name(submit.prefix.peer) and 0 <= submit.prefix.num_tokens < INT32):
        yield "prefix must name a node, an epoch of 64 bits, and a number of tokens"
    if not all(map(_is_name, submit.helpers)):
        yield "helpers must name nodes, and epochs of 64 bits"
    if submit.helpers and (submit.mode == "decode" or submit.media or submit.adapter or submit.is_precise):
        yield "helpers are for prompts of text that the model computes by itself"


def _is_name(peer: PeerRef) -> bool:
    """Whether a peer has a name. Its address may be none: then it can't be reached, and it alone."""
    return 0 < len(peer.node_id) <= MAX_ID_CHARS and 0 <= peer.epoch < INT64
