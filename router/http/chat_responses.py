"""Chat's answers: messages, and deltas of them as server-sent events."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable
from typing import Any

from tandem.router.chat.chat import Chat
from tandem.router.chat.chat_body import ChatBody
from tandem.router.chat.deltas import CallArguments, CallStart, ChatMessage, Content, Delta, Reasoning, merged
from tandem.router.http.responses import encode, frame, head, usage_end
from tandem.router.requests.sample_output import ChatLogprobs, Piece
from tandem.router.text.completion import ModelFacts

_LETTERS = string.ascii_letters + string.digits


class ChatOutput:
    """One choice's text on its way through the parser; counts what is reasoning, by pieces."""

    def __init__(self, body: ChatBody, chat: Chat, prompt: str) -> None:
        self._parser = chat.parsers.make(body.callable_names, prompt)
        self._one_call = body.parallel_tool_calls is False
        self._hides_reasoning = body.include_reasoning is False
        self.num_calls = self.num_reasoning_tokens = 0

    def read(self, piece: Piece) -> list[Delta]:
        deltas = self._parser.feed(piece.text)
        if self._parser.is_reasoning:
            self.num_reasoning_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            deltas += self._parser.finish()
        return merged([delta for delta in deltas if self._is_shown(delta)])

    def _is_shown(self, delta: Delta) -> bool:
        if isinstance(delta, CallStart | CallArguments):
            self.num_calls = max(self.num_calls, delta.index + 1)
            return delta.index == 0 or not self._one_call
        return not (isinstance(delta, Reasoning) and self._hides_reasoning)

    def finish_reason(self, said: str) -> str:
        return "tool_calls" if said == "stop" and self.num_calls else said


class ChatFormat:
    """Answers to one conversation."""

    def __init__(self, completion_id: str, body: ChatBody, facts: ModelFacts, chat: Chat, prompt: str) -> None:
        self._id, self._facts, self._body, self._chat, self._prompt = completion_id, facts, body, chat, prompt
        self._outputs: list[ChatOutput] = []
        self._counts_reasoning = chat.parsers.reasoning != "none"

    def output(self) -> ChatOutput:
        self._outputs.append(ChatOutput(self._body, self._chat, self._prompt))
        return self._outputs[-1]

    def call_id(self) -> str:
        if self._chat.has_short_call_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def choice(self) -> ChatChoice:
        return ChatChoice(self, bool(self._body.return_token_ids))

    def whole(self, choices: list[dict[str, Any]], usage_dict: dict[str, Any]) -> bytes:
        return encode({**head(self._id, "chat.completion", self._facts), "choices": choices, "usage": usage_dict})

    def writer(self) -> ChatEventWriter:
        head_dict = head(self._id, "chat.completion.chunk", self._facts)
        return ChatEventWriter(self, head_dict, self._body.includes_usage, bool(self._body.return_token_ids))

    def usage_details(self) -> dict[str, Any]:
        if not self._counts_reasoning:
            return {}
        count = sum(output.num_reasoning_tokens for output in self._outputs)
        return {"completion_tokens_details": {"reasoning_tokens": count}}


class ChatChoice:
    """One choice of an answer that is not streamed."""

    def __init__(self, form: ChatFormat, with_token_ids: bool) -> None:
        self._form, self._with_token_ids = form, with_token_ids
        self._output, self._message = form.output(), ChatMessage()
        self._token_ids: list[int] = []
        self._logprobs: ChatLogprobs | None = None
        self._finish_reason: str | None = None

    def add(self, piece: Piece) -> None:
        self._message.add(self._output.read(piece))
        if self._with_token_ids:
            self._token_ids += piece.token_ids
        if piece.logprobs is not None:
            assert isinstance(piece.logprobs, ChatLogprobs)
            self._logprobs = self._logprobs or ChatLogprobs()
            self._logprobs.extend(piece.logprobs)
        if piece.finish_reason is not None:
            self._finish_reason = self._output.finish_reason(piece.finish_reason)

    def as_dict(self, index: int, echo: Piece | None) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": self._message_dict(),
            "logprobs": self._logprobs,
            "finish_reason": self._finish_reason,
        }
        return choice | {"token_ids": self._token_ids} if self._with_token_ids else choice

    def _message_dict(self) -> dict[str, Any]:
        said = self._message
        found: dict[str, Any] = {"role": "assistant", "content": said.content, "refusal": None}
        if said.reasoning:
            found |= {"reasoning_content": said.reasoning, "reasoning": said.reasoning}
        if said.calls:
            found["content"] = said.content or None
            found["tool_calls"] = [
                {
                    "id": self._form.call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return found


class ChatEventWriter:
    """Server-sent events of one answer. A choice begins with its role and ends with its reason."""

    def __init__(self, form: ChatFormat, head_dict: dict[str, Any], include_usage: bool, with_token_ids: bool) -> None:
        self._form, self._with_token_ids = form, with_token_ids
        self._start, self._end = frame(head_dict, include_usage)
        self._outputs: dict[int, ChatOutput] = {}
        self._plain: dict[int, bytes] = {}  # per choice, all that comes before the text of most events
        self._plain_end = b'},"logprobs":null,"finish_reason":null}' + self._end

    def piece(
        self, index: int, piece: Piece, extra: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> bytes:
        events: list[bytes] = []
        end = self._end if usage is None else usage_end(usage)
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = self._form.output()
            self._plain[index] = self._start + b'{"index":%d,"delta":{"content":' % index
            events.append(self._event(index, {"role": "assistant", "content": ""}, extra, end))
        deltas = output.read(piece)
        beside: dict[str, Any] = {}  # what the first event of a piece says besides
        if piece.logprobs is not None:
            beside["logprobs"] = piece.logprobs
        if self._with_token_ids:
            beside["token_ids"] = piece.token_ids
        if not beside and usage is None and len(deltas) == 1 and isinstance(deltas[0], Content):
            events.append(self._plain[index] + encode(deltas[0].text) + self._plain_end)
        else:
            for said in [*self._dicts(deltas)] or [{}] * bool(beside):
                events.append(self._event(index, said, beside, end))
                beside = {}
        if piece.finish_reason is not None:
            reason = {"finish_reason": output.finish_reason(piece.finish_reason)}
            events.append(self._event(index, {}, reason, end))
        return b"".join(events)

    def usage(self, usage_dict: dict[str, Any]) -> bytes:
        return self._start + usage_end(usage_dict)

    def _event(self, index: int, delta: dict[str, Any], extra: dict[str, Any] | None, end: bytes) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(extra or {})}
        return self._start + encode(choice) + end

    def _dicts(self, deltas: Iterable[Delta]) -> Iterable[dict[str, Any]]:
        for delta in deltas:
            if isinstance(delta, Content):
                yield {"content": delta.text}
            elif isinstance(delta, Reasoning):
                yield {"reasoning_content": delta.text, "reasoning": delta.text}
            elif isinstance(delta, CallStart):
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": self._form.call_id(), "type": "function", "function": function}
                yield {"tool_calls": [call]}
            else:
                yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
