"""Chat's answers: messages, and deltas of them as server-sent events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.engine.contracts.errors import TandemError
from tandem.router.chat.chat import Chat, ChatOutput
from tandem.router.chat.chat_body import ChatBody
from tandem.router.chat.deltas import CallStart, ChatMessage, Content, Delta, Reasoning
from tandem.router.http.responses import DONE, encode, error_event, frame, head, usage_end
from tandem.router.requests.sample_output import ChatLogprobs, Piece
from tandem.router.text.completion import ModelFacts

OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")  # vLLM has them beside the choices of chat, in those of completions
CHOICES = b',"choices":['


class ChatFormat:
    """Answers to one conversation."""

    def __init__(self, completion_id: str, body: ChatBody, facts: ModelFacts, chat: Chat, prompt: str) -> None:
        self._id, self._facts, self._body, self.chat, self._prompt = completion_id, facts, body, chat, prompt
        self._outputs: list[ChatOutput] = []
        self._counts_reasoning = chat.parsers.reasoning != "none"

    def output(self) -> ChatOutput:
        self._outputs.append(self.chat.output(self._body, self._prompt))
        return self._outputs[-1]

    def choice(self) -> ChatChoice:
        return ChatChoice(self, bool(self._body.return_token_ids))

    def whole(self, choices: list[dict[str, Any]], usage_dict: dict[str, Any]) -> bytes:
        of_prompt = {name: choices[0][name] for name in OF_PROMPT if name in choices[0]}
        answer = {**head(self._id, "chat.completion", self._facts), "choices": choices, "usage": usage_dict}
        return encode(answer | of_prompt)

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
        self._scores: dict[str, float] = {}

    def add(self, piece: Piece) -> None:
        self._message.add(self._output.read(piece.texts(), len(piece.token_ids), piece.finish_reason is not None))
        if self._with_token_ids:
            self._token_ids += piece.token_ids
        if piece.logprobs is not None:
            assert isinstance(piece.logprobs, ChatLogprobs)
            self._logprobs = self._logprobs or ChatLogprobs()
            self._logprobs.extend(piece.logprobs)
        if piece.finish_reason is not None:
            self._finish_reason = self._output.finish_reason(piece.finish_reason)
        self._scores |= piece.scores or {}

    def as_dict(self, index: int, echo: Piece | None) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": self._message_dict(),
            "logprobs": self._logprobs,
            "finish_reason": self._finish_reason,
            **self._scores,
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
                    "id": self._form.chat.call_id(),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in said.calls
            ]
        return found


class ChatEventWriter:
    """Server-sent events of one answer. A choice begins with its role and ends with its reason."""

    def __init__(self, form: ChatFormat, head_dict: dict[str, Any], include_usage: bool, with_token_ids: bool) -> None:
        self._form, self._include_usage, self._with_token_ids = form, include_usage, with_token_ids
        self._start, self._end = frame(head_dict, include_usage)
        self._outputs: dict[int, ChatOutput] = {}
        self._plain: dict[int, bytes] = {}  # choice -> the bytes before the text in most of its events
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
        deltas = output.read(piece.texts(), len(piece.token_ids), piece.finish_reason is not None)
        beside: dict[str, Any] = {}  # further fields of the first event of a piece
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
            reason = {"finish_reason": output.finish_reason(piece.finish_reason), **(piece.scores or {})}
            events.append(self._event(index, {}, reason, end))
        return b"".join(events)

    def end(self, usage_dict: dict[str, Any]) -> bytes:
        return (self._start + usage_end(usage_dict) if self._include_usage else b"") + DONE

    def failed(self, error: TandemError) -> bytes:
        return error_event(error)

    def _event(self, index: int, delta: dict[str, Any], extra: dict[str, Any] | None, end: bytes) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(extra or {})}
        of_prompt = {name: choice[name] for name in OF_PROMPT if name in choice}
        start = (
            self._start.removesuffix(CHOICES) + b"," + encode(of_prompt)[1:-1] + CHOICES if of_prompt else self._start
        )
        return start + encode(choice) + end

    def _dicts(self, deltas: Iterable[Delta]) -> Iterable[dict[str, Any]]:
        for delta in deltas:
            if isinstance(delta, Content):
                yield {"content": delta.text}
            elif isinstance(delta, Reasoning):
                yield {"reasoning_content": delta.text, "reasoning": delta.text}
            elif isinstance(delta, CallStart):
                function = {"name": delta.name, "arguments": ""}
                call = {"index": delta.index, "id": self._form.chat.call_id(), "type": "function", "function": function}
                yield {"tool_calls": [call]}
            else:
                yield {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
