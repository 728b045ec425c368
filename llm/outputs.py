"""What comes back of a request, whole or as far as it has come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class CompletionOutput:
    """One sample. `logprobs`, where they were asked for: of each token its own and its best rivals', by their text.

    Of an answer in a conversation: `text` is its content, `reasoning` what the model thought before, where the server
    tells them apart, and `tool_calls` what it wants to be called, as the chat API says it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, float]] | None = None
    token_logprobs: list[float] | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the sample's tokens, where log-probabilities were asked for."""
        return None if self.token_logprobs is None else sum(self.token_logprobs)

    def add(self, choice: Mapping[str, Any]) -> None:
        """Takes a choice of a response, or of one event of a stream."""
        said = choice.get("message") or choice.get("delta")
        if said is None:
            self.text += choice["text"]
        else:
            self._add_message(said)
        self.token_ids += choice.get("token_ids") or ()
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        if (logprobs := choice.get("logprobs")) is not None:
            tops, chosen = _of_text(logprobs) if "token_logprobs" in logprobs else _of_chat(logprobs)
            self.logprobs = [*(self.logprobs or ()), *tops]
            self.token_logprobs = [*(self.token_logprobs or ()), *chosen]

    def _add_message(self, said: Mapping[str, Any]) -> None:
        self.text += said.get("content") or ""
        self.reasoning += said.get("reasoning_content") or ""
        for place, call in enumerate(said.get("tool_calls") or ()):
            index = call.get("index", place)
            if index == len(self.tool_calls):
                self.tool_calls.append(
                    {"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}}
                )
            function = self.tool_calls[index]["function"]
            for name in ("name", "arguments"):
                function[name] += call["function"].get(name) or ""


def _of_text(logprobs: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[float]]:
    return logprobs["top_logprobs"], logprobs["token_logprobs"]


def _of_chat(logprobs: Mapping[str, Any]) -> tuple[list[dict[str, float]], list[float]]:
    entries = logprobs["content"] or ()
    tops = [{top["token"]: top["logprob"] for top in (entry, *reversed(entry["top_logprobs"]))} for entry in entries]
    return tops, [entry["logprob"] for entry in entries]


@dataclass
class RequestOutput:
    """A request's prompt and its samples; `finished` says that no more will come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    num_cached_tokens: int | None = None

    def add(self, answer: Mapping[str, Any]) -> None:
        """Takes a response, or one event of a stream."""
        for choice in answer["choices"]:
            self.outputs[choice["index"]].add(choice)
            self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
            self.prompt_logprobs = choice.get("prompt_logprobs") or self.prompt_logprobs
        if usage := answer.get("usage"):
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def end(self, reason: str) -> None:
        """Nothing more comes: samples that have no finish reason get this one."""
        self.finished = True
        for sample in self.outputs:
            sample.finish_reason = sample.finish_reason or reason
