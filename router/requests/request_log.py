"""The request log: one line for each HTTP request that asked a model, when it has ended (--enable-log-requests)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import TandemError
from tandem.router.access.limits import Permit
from tandem.router.recent.story import RequestStory
from tandem.router.requests.actions import Fail
from tandem.router.requests.generation import Generation
from tandem.router.text.request_headers import RequestHeaders

logger = logging.getLogger("tandem.requests")


@dataclass(frozen=True, slots=True)
class Stage:
    """Something that a prompt went through, in monotonic seconds: "queue", "prefill", "transfer" or "decode"."""

    name: str
    begin: float
    end: float
    attributes: dict[str, str | int]


@dataclass(slots=True)
class HttpExchange:
    """One HTTP request and its answer, as far as they have come. Times in seconds of a monotonic clock."""

    path: str
    started_at: float = field(default_factory=time.monotonic)
    said: RequestHeaders = field(default_factory=RequestHeaders)
    permit: Permit | None = None
    completion_id: str = ""
    model: str = ""  # by the name that the client gave; of traces alone
    stages: list[list[Stage]] = field(default_factory=list)  # of each prompt; of traces alone
    stories: list[RequestStory] = field(default_factory=list)  # of each prompt; of traces alone
    error: str = ""  # why it failed, as the client reads it in `code` or `type`
    figures: dict[str, Any] = field(default_factory=dict)

    def admit(self, permit: Permit, said: RequestHeaders) -> None:
        self.permit, self.said = permit, said

    def name(self, completion_id: str) -> None:
        self.completion_id = completion_id

    def trace(self, model: str, stages: list[list[Stage]], stories: list[RequestStory]) -> None:
        """Takes what traces tell besides: the model's name, what its prompts went through, and their stories."""
        self.model, self.stages, self.stories = model, stages, stories

    def fail(self, error: TandemError) -> None:
        self.error = error.code or error.type

    def count(self, generations: Sequence[Generation], num_chars: int) -> None:
        """Takes what came of its prompts. `num_chars`: how much of each prompt's text is kept."""
        first_at = min((g.first_token_at for g in generations if g.first_token_at is not None), default=None)
        samples = [sample for generation in generations for sample in generation.samples]
        self.figures = {
            "prompts": len(generations),
            "prompt_tokens": sum(len(generation.plan.token_ids) for generation in generations),
            "cached_tokens": sum(generation.machine.num_cached_tokens for generation in generations),
            "output_tokens": sum(sample.num_tokens for sample in samples),
            "ttft_s": None if first_at is None else round(first_at - self.started_at, 4),
            "finish": sorted({sample.finish_reason or "none" for sample in samples}),
            "attempts": max((generation.machine.attempts.highest_number for generation in generations), default=0),
            "nodes": sorted({node for generation in generations for node in generation.node_ids}),
        }
        failed = [g.machine.outcome.error for g in generations if isinstance(g.machine.outcome, Fail)]
        if failed:
            self.fail(failed[0])
        if num_chars:
            texts = [g.plan.text if g.plan.text is not None else str(g.plan.token_ids.tolist()) for g in generations]
            self.figures["texts"] = [text[:num_chars] for text in texts]


class RequestLog:
    """Writes the lines of one router process; none unless the options ask for them."""

    def __init__(self, options: RouterOptions) -> None:
        self.is_on, self.num_chars = options.enable_log_requests, options.log_prompt_chars

    def write(self, exchange: HttpExchange, status: int) -> None:
        """Writes the line of an exchange. `status`: the answer's, or what it would have been for a client that left."""
        if not self.is_on:
            return
        said, caller = exchange.said, None if exchange.permit is None else exchange.permit.caller
        fields = {
            "id": exchange.completion_id,
            "request_id": said.request_id,
            "trace_id": said.trace_id,
            "path": exchange.path,
            "key": "" if caller is None else caller.name,
            "tenant": "" if caller is None else caller.tenant.name,
            "status": status,
            "error": exchange.error,
            **exchange.figures,
            "duration_s": round(time.monotonic() - exchange.started_at, 4),
        }
        shown = {name: value for name, value in fields.items() if value not in (None, "", [])}
        logger.info("%s", " ".join(f"{name}={_text(value)}" for name, value in shown.items()), extra={"fields": shown})


def _text(value: Any) -> str:
    """A value of a line for people; what clients write can't begin another line or field."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if text.isprintable() and not set(text) & set(' ="') else repr(text)
