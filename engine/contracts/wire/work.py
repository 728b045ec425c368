"""What a node tells routers of its work, so that they can foresee what becomes of it (docs/elastic.md)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.engine.contracts.wire.parts import NO_TARGETS, Count, Seconds, Targets

MOST_PROMPTS = 64  # that are told one by one, a dozen bytes each; a guess
LeaningName = Literal["prefill", "decode", "unified"]
DueIn = Annotated[float, Meta(ge=-1e9, le=1e9)]  # seconds; below 0: it is late


class NodeReport(msgspec.Struct, frozen=True, array_like=True):
    """The work of a node that orders its prompts by deadlines. Seconds count from when it tells."""

    s_per_token: Seconds = 0.0  # of a prompt, beside the streams that run now; 0.0: not measured
    least_s_per_token: Seconds = 0.0  # of a short prompt on the idle node; 0.0: not measured
    attention_growth: Seconds = 0.0  # for each token before it a prompt's token takes longer by so much of the least
    free_s: Seconds = 0.0  # until the step that runs has ended
    # Those that are due first: seconds until the first token is due, tokens that are left.
    prompts: Annotated[tuple[tuple[DueIn, Count], ...], Meta(max_length=MOST_PROMPTS)] = ()
    num_more_tokens: Count = 0  # of all prompts that are due later than those
    num_streams: Count = 0
    step_s: Seconds = 0.0  # of a step of its streams alone
    stream_s_per_token: Seconds = 0.0  # what a stream adds to that, for each token of its context
    free_tokens: Count = (1 << 31) - 1  # of KV that nobody holds
    targets: Targets = NO_TARGETS  # what it promises to requests that bring no promise
    prompt_share: Seconds = 0.0  # of its time that prompts took lately
    least_step_s: Seconds = 0.0  # of a step of streams without context; 0.0: not measured


class Leaning(msgspec.Struct, frozen=True, array_like=True):
    """Which work a node that does all is for first: prompts ("prefill"), streams ("decode") or neither ("unified")."""

    role: LeaningName = "unified"
    is_pinned: bool = False  # by an operator: demand doesn't change it
    why: Annotated[str, Meta(max_length=200)] = ""  # for people
    for_s: Seconds = 0.0  # how long it has been so


NO_LEANING = Leaning()
