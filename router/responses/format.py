"""Answers of /v1/responses: one object, or the events of its making."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.router.chat.chat import Chat
from tandem.router.chat.chat_body import ChatBody
from tandem.router.requests.sample_output import ChatLogprobs, Piece
from tandem.router.responses.body import ResponsesBody
from tandem.router.responses.output_items import COMPLETED, IN_PROGRESS, INCOMPLETE, Event, OutputItems, Rows

_encode = msgspec.json.Encoder().encode


class ResponsesAnswer:
    """The one answer to a body, as it grows."""

    def __init__(self, body: ChatBody, chat: Chat, prompt: str) -> None:
        self._output, self._items = chat.output(body, prompt), OutputItems(chat)
        self._status = IN_PROGRESS

    def read(self, piece: Piece) -> list[Event]:
        is_last = piece.finish_reason is not None
        deltas = self._output.read(piece.texts(), len(piece.token_ids), is_last)
        rows: Rows = []
        if isinstance(piece.logprobs, ChatLogprobs):
            of_tokens = zip(piece.logprobs.content, self._output.are_reasoning, strict=False)
            rows = [row for row, is_reasoning in of_tokens if not is_reasoning]
        events = self._items.read(deltas, rows)
        if is_last:
            self._status = INCOMPLETE if piece.finish_reason == "length" else COMPLETED
            events += self._items.finish(self._status)
        return events

    @property
    def num_reasoning_tokens(self) -> int:
        return self._output.num_reasoning_tokens

    def as_dict(self) -> dict[str, Any]:
        is_cut = self._status == INCOMPLETE
        return {
            "status": self._status,
            "completed_at": int(time.time()) if self._status == COMPLETED else None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": list(self._items.done),
        }


class ResponsesFormat:
    """How one body is answered. `sampling` is what the nodes were asked for, the model's own defaults included."""

    def __init__(
        self, response_id: str, model: str, body: ResponsesBody, sampling: SamplingParams, answer: ResponsesAnswer
    ) -> None:
        self.answer = answer
        self._head = _head(response_id, model, body, sampling)

    def choice(self) -> ResponsesChoice:
        return ResponsesChoice(self.answer)

    def whole(self, choices: list[dict[str, Any]], usage_dict: dict[str, Any]) -> bytes:
        return _encode(self.response(usage_dict))

    def writer(self) -> ResponsesWriter:
        return ResponsesWriter(self)

    def usage_details(self) -> dict[str, Any]:
        return {"completion_tokens_details": {"reasoning_tokens": self.answer.num_reasoning_tokens}}

    def response(self, usage_dict: dict[str, Any] | None) -> dict[str, Any]:
        """The response as it is now; `usage_dict` as completions have it."""
        return {**self._head, **self.answer.as_dict(), "usage": usage_dict and _usage(usage_dict)}


class ResponsesChoice:
    """The one choice of an answer: the answer itself reads its pieces."""

    def __init__(self, answer: ResponsesAnswer) -> None:
        self._answer = answer

    def add(self, piece: Piece) -> None:
        self._answer.read(piece)

    def as_dict(self, index: int, echo: Piece | None) -> dict[str, Any]:
        return {}  # the format has the answer


class ResponsesWriter:
    """Server-sent events, numbered from 0; the last one has the whole response."""

    def __init__(self, form: ResponsesFormat) -> None:
        self._form, self._num_events = form, 0

    def piece(
        self, index: int, piece: Piece, extra: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> bytes:
        events: list[Event] = []
        if not self._num_events:
            begun = {"response": self._form.response(None)}
            events = [("created", begun), ("in_progress", begun)]
        return self._bytes([*events, *self._form.answer.read(piece)])

    def end(self, usage_dict: dict[str, Any]) -> bytes:
        response = self._form.response(usage_dict)
        return self._bytes([(response["status"], {"response": response})])

    def failed(self, error: TandemError) -> bytes:
        fault = {"code": "server_error", "message": error.message}
        response = {**self._form.response(None), "status": "failed", "error": fault}
        return self._bytes([("failed", {"response": response})])

    def _bytes(self, events: list[Event]) -> bytes:
        return b"".join(self._event(*event) for event in events)

    def _event(self, kind: str, said: dict[str, Any]) -> bytes:
        name = f"response.{kind}"
        data = {"type": name, "sequence_number": self._num_events, **said}
        self._num_events += 1
        return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(data))


def _head(response_id: str, model: str, body: ResponsesBody, sampling: SamplingParams) -> dict[str, Any]:
    """The fields of a response that stay the same from its beginning to its end."""
    asked = body.text.format if body.text is not None else None
    effort = body.reasoning.effort if body.reasoning is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": asked or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }


def _usage(usage_dict: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": usage_dict["prompt_tokens"],
        "input_tokens_details": {**usage_dict["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage_dict["completion_tokens"],
        "output_tokens_details": usage_dict["completion_tokens_details"],
        "total_tokens": usage_dict["total_tokens"],
    }
