"""The bodies that clients get: completion objects and server-sent events, encoded once to bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tandem.engine.contracts.errors import TandemError
from tandem.router.requests.sample_output import Piece, TextLogprobs
from tandem.router.text.completion import ModelFacts
from tandem.router.text.openai_api import CompletionBody, error_body

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class AnswerChoice(Protocol):
    """One choice of an answer that is not streamed, as it grows."""

    def add(self, piece: Piece) -> None: ...

    def as_dict(self, index: int, echo: Piece | None) -> dict[str, Any]:
        """The choice as clients read it, its prompt before it if that is asked for."""


class AnswerWriter(Protocol):
    """Writes a streamed answer as server-sent events."""

    def piece(
        self, index: int, piece: Piece, extra: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> bytes:
        """The events of a piece of choice `index`, perhaps none. `extra` goes into its choice, `usage` is so far."""

    def end(self, usage_dict: dict[str, Any]) -> bytes:
        """The end of a stream of which all choices have ended."""

    def failed(self, error: TandemError) -> bytes:
        """Ends a stream that had begun, so that nobody takes it for a success."""


class AnswerFormat(Protocol):
    """How the answers of one path are written."""

    def choice(self) -> AnswerChoice: ...

    def whole(self, choices: list[dict[str, Any]], usage_dict: dict[str, Any]) -> bytes: ...

    def writer(self) -> AnswerWriter: ...

    def usage_details(self) -> dict[str, Any]:
        """The fields of usage besides the tokens of prompts and output."""


class CompletionFormat:
    """Completions, of all prompts of one body."""

    def __init__(self, completion_id: str, body: CompletionBody, facts: ModelFacts) -> None:
        self._head = head(completion_id, "text_completion", facts)
        self._include_usage = body.includes_usage
        self._with_token_ids = bool(body.return_token_ids)

    def choice(self) -> CompletionChoice:
        return CompletionChoice(self._with_token_ids)

    def whole(self, choices: list[dict[str, Any]], usage_dict: dict[str, Any]) -> bytes:
        return encode({**self._head, "choices": choices, "usage": usage_dict})

    def writer(self) -> EventWriter:
        return EventWriter(self._head, self._include_usage, self._with_token_ids)

    def usage_details(self) -> dict[str, Any]:
        return {}


@dataclass(slots=True)
class CompletionChoice:
    """One choice of a text completion, gathered until it is whole."""

    with_token_ids: bool
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    scores: dict[str, float] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids
        if piece.logprobs is not None:
            assert isinstance(piece.logprobs, TextLogprobs)
            if self.logprobs is None:
                self.logprobs = TextLogprobs()
            self.logprobs.extend(piece.logprobs)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.scores |= piece.scores or {}

    def as_dict(self, index: int, echo: Piece | None) -> dict[str, Any]:
        if echo is not None:
            complete = CompletionChoice(self.with_token_ids)
            complete.add(echo)
            complete.add(Piece("".join(self.text), self.token_ids, self.logprobs, None))
            complete.finish_reason, complete.scores = self.finish_reason, self.scores
            return complete.as_dict(index, None)
        choice = {
            "index": index,
            "text": "".join(self.text),
            "logprobs": self.logprobs,
            "finish_reason": self.finish_reason,
            **self.scores,
        }
        return choice | {"token_ids": self.token_ids} if self.with_token_ids else choice


def usage(num_prompt_tokens: int, num_completion_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def head(completion_id: str, kind: str, facts: ModelFacts) -> dict[str, Any]:
    return {"id": completion_id, "object": kind, "created": int(time.time()), "model": facts.name}


class EventWriter:
    """Server-sent events of one response; all but the choice is encoded once."""

    def __init__(self, head_dict: dict[str, Any], include_usage: bool, with_token_ids: bool) -> None:
        self._start, self._end = frame(head_dict, include_usage)
        self._include_usage, self._with_token_ids = include_usage, with_token_ids
        self._plain: dict[int, bytes] = {}  # choice -> the bytes before the text in most of its events
        self._plain_end = b',"logprobs":null,"finish_reason":null}' + self._end

    def piece(
        self, index: int, piece: Piece, extra: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> bytes:
        is_plain = piece.finish_reason is None and piece.logprobs is None and not self._with_token_ids
        if is_plain and extra is None and usage is None:
            start = self._plain.get(index)
            if start is None:
                start = self._plain[index] = self._start + b'{"index":%d,"text":' % index
            return start + encode(piece.text) + self._plain_end
        choice: dict[str, Any] = {
            "index": index,
            "text": piece.text,
            "logprobs": piece.logprobs,
            "finish_reason": piece.finish_reason,
            **(piece.scores or {}),
        }
        if self._with_token_ids:
            choice["token_ids"] = piece.token_ids
        if extra:
            choice |= extra
        return b"".join((self._start, encode(choice), self._end if usage is None else usage_end(usage)))

    def end(self, usage_dict: dict[str, Any]) -> bytes:
        return (self._start + usage_end(usage_dict) if self._include_usage else b"") + DONE

    def failed(self, error: TandemError) -> bytes:
        return error_event(error)


def frame(head_dict: dict[str, Any], include_usage: bool) -> tuple[bytes, bytes]:
    """The bytes before and after the choices of an event."""
    return (
        b"data: " + encode(head_dict)[:-1] + b',"choices":[',
        b'],"usage":null}\n\n' if include_usage else b"]}\n\n",
    )


def usage_end(usage_dict: dict[str, Any]) -> bytes:
    return b'],"usage":' + encode(usage_dict) + b"}\n\n"


def error_event(error: TandemError) -> bytes:
    """The event that ends a failed stream. No [DONE] follows it."""
    return b"data: " + error_body(error) + b"\n\n"
