"""When a sequence ends: the one place that knows max_tokens, max_model_len, EOS, stop ids and min_tokens."""

from __future__ import annotations

from collections.abc import Collection

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import FinishReason
from tandem.engine.scheduling.request import Request


def max_num_tokens(request: Request, max_model_len: int) -> int:
    """Most tokens, prompt and output, that `request` may have. `max_tokens` counts the output of prior attempts too."""
    return min(max_model_len, request.prompt.num_true_tokens + request.prompt.sampling.max_tokens)


def end_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """The tokens that end an output."""
    return frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)))


def finish_reason(
    request: Request, token_id: int, output_index: int, num_tokens: int, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Why `token_id` ends its sample, which has `num_tokens` tokens with it; None: it goes on.

    The sampler bans stop ids while output_index < min_tokens. The same bound holds here, so that a stop id which
    comes through all the same (a logit bias of infinity) doesn't end the sample early.
    """
    sampling = request.prompt.sampling
    if output_index >= sampling.min_tokens:
        is_eos = token_id in eos_token_ids and not sampling.ignore_eos
        if is_eos or token_id in sampling.stop_token_ids:
            return "stop"
    return "length" if num_tokens >= request.max_num_tokens else None
