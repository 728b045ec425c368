"""The bodies that clients get: completion objects and server-sent events, encoded once to bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tandem.engine.contracts.errors import TandemError
from tandem.router.requests.sample_output import Piece, TextLogprobs
from tandem.router.text.completion import ModelFacts
from tandem.router.text.openai_api import error_body

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class CompletionChoice:
    """One choice of a response that is not streamed, as it grows."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = TextLogprobs()
            self.logprobs.extend(piece.logprobs)
        self.finish_reason = piece.finish_reason or self.finish_reason

    def as_dict(self, index: int, with_token_ids: bool) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(self.text),
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            **self.extra,
        }
        return choice | {"token_ids": self.token_ids} if with_token_ids else choice


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def completion(
    completion_id: str, facts: ModelFacts, choices: list[dict[str, Any]], usage_dict: dict[str, Any]
) -> bytes:
    return _encode({**_head(completion_id, facts), "choices": choices, "usage": usage_dict})


def _head(completion_id: str, facts: ModelFacts) -> dict[str, Any]:
    return {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": facts.name}


class EventWriter:
    """Server-sent events of one response; all but the choice is encoded once."""

    def __init__(self, completion_id: str, facts: ModelFacts, include_usage: bool, with_token_ids: bool) -> None:
        head = _encode(_head(completion_id, facts))
        self._start = b"data: " + head[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._with_token_ids = with_token_ids
        self._plain: dict[int, bytes] = {}  # per choice, all that comes before the text of most events
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._end

    def piece(self, index: int, piece: Piece, extra: dict[str, Any] | None = None) -> bytes:
        if piece.finish_reason is None and piece.logprobs is None and not self._with_token_ids and extra is None:
            start = self._plain.get(index)
            if start is None:
                start = self._plain[index] = self._start + b'{"index":%d,"text":' % index
            return start + _encode(piece.text) + self._plain_end
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
        }
        if self._with_token_ids:
            choice["token_ids"] = piece.token_ids
        if extra:
            choice |= extra
        return b"".join((self._start, _encode(choice), self._end))

    def usage(self, usage_dict: dict[str, Any]) -> bytes:
        return b"".join((self._start, b'],"usage":', _encode(usage_dict), b"}\n\n"))


def error_event(error: TandemError) -> bytes:
    """Ends a stream that had begun; no [DONE] follows, so that nobody takes it for a success."""
    return b"data: " + error_body(error) + b"\n\n"
