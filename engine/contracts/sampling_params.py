"""How one request's tokens are chosen. Validated by the router, carried in `Submit`, read by the sampler."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Per-request sampling settings; token ids only, no text.

    Stop *strings* are the router's business (it owns the text); nodes see only `stop_token_ids`.
    `seed` is always set when it reaches a node: the router draws one where the client gave none, so that a
    second attempt continues the same random sequence.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0  # u64
    num_logprobs: int | None = None  # None: off; 0: the sampled token's only; k: top k as well
    num_prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    banned_first_ids: tuple[int, ...] = ()  # not drawn as the first output token
    ignore_eos: bool = False
    grammar: str = ""  # what the output must follow, as engine/structured reads it; "": anything
    allowed_token_ids: tuple[int, ...] = ()  # all others are banned; (): none is
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of token ids that the output must not contain
    # Beam search (docs/beams.md) over so many beams, of which the samples are the best; 0: none. The next two are as in
    # transformers' generate.
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether what may be drawn depends on how often tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_guided(self) -> bool:
        """Whether what may be drawn depends on more than the logits: rows of such requests have masks."""
        return bool(self.grammar or self.allowed_token_ids or self.bad_words)
