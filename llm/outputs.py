"""The outputs of requests, whole or as far as they have come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability. `rank`: 1 for the likeliest at its place; None: not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


Logprobs: TypeAlias = list[dict[int, Logprob]]  # of each token its own, first, and its best rivals', by their ids


@dataclass
class CompletionOutput:
    """One sample, with `logprobs` where they were asked for.

    Of an answer in a conversation: `text` is its content, `reasoning` what the model thought before, where the server
    tells them apart, and `tool_calls` what it wants to be called, as the chat API says it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    score: float | None = None  # of an output that beams found
    sum_logprobs: float | None = None
    num_rivals: int = field(default=0, repr=False, compare=False)  # of which log-probabilities were asked for

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the sample's tokens, where log-probabilities were asked for, or beams searched."""
        if self.sum_logprobs is not None or self.logprobs is None:
            return self.sum_logprobs
        return sum(next(iter(row.values())).logprob for row in self.logprobs)

    def add(self, choice: Mapping[str, Any]) -> None:
        """Takes a choice of a response, or of one event of a stream."""
        said = choice.get("message") or choice.get("delta")
        if said is None:
            self.text += choice["text"]
        else:
            self._add_message(said)
        self.token_ids += choice.get("token_ids") or ()
        self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.score = choice.get("score", self.score)
        self.sum_logprobs = choice.get("cumulative_logprob", self.sum_logprobs)
        if (logprobs := choice.get("logprobs")) is not None:
            rows = logprobs["top_logprobs"] if "top_logprobs" in logprobs else _rows_of_chat(logprobs)
            self.logprobs = [*(self.logprobs or ()), *(_by_id(row, self.num_rivals) for row in rows)]

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


def _rows_of_chat(logprobs: Mapping[str, Any]) -> list[dict[str, float]]:
    """A chat's log-probabilities in the form that completions have, with each token's own first."""
    entries = logprobs["content"] or ()
    return [{top["token"]: top["logprob"] for top in (entry, *entry["top_logprobs"])} for entry in entries]


def _by_id(row: Mapping[str, float], num_rivals: int) -> dict[int, Logprob]:
    """Log-probabilities of a token and its rivals by their ids, which are read from keys like "token_id:7:text". A
    token that is one of the `num_rivals` likeliest stands in the row once."""
    by_rank = sorted(row, key=lambda name: -row[name])
    ranks: dict[str, int | None] = {name: rank for rank, name in enumerate(by_rank, 1)}
    if len(row) > num_rivals and next(iter(row)) == by_rank[-1]:
        ranks[by_rank[-1]] = None  # it may be far below
    found = {}
    for name, logprob in row.items():
        _, token_id, text = name.split(":", 2)
        found[int(token_id)] = Logprob(logprob, ranks[name], text)
    return found


def _of_prompt(row: Mapping[str, Mapping[str, Any]]) -> dict[int, Logprob]:
    return {int(token_id): Logprob(**said) for token_id, said in row.items()}


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """An output that a beam search found, behind its prompt: `tokens` and `text` have both, but for the text of a
    prompt that was given as tokens."""

    tokens: list[int]
    text: str
    cum_logprob: float | None  # of the output; None: a grammar has fewer outputs than there are beams
    score: float | None  # by which outputs are ordered: the same divided by the output's length to the length penalty
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The outputs of one prompt, best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, output: RequestOutput) -> BeamSearchOutput:
        return cls(
            [
                BeamSearchSequence(
                    [*output.prompt_token_ids, *found.token_ids],
                    (output.prompt or "") + found.text,
                    found.cumulative_logprob,
                    found.score,
                    found.finish_reason,
                )
                for found in output.outputs
            ]
        )


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """How well one pair of texts fits together."""

    score: float  # in [0, 1]


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """What a model that pools made of one input, or pair of inputs, at its place among those that were given."""

    index: int
    outputs: Any  # EmbeddingOutput or ScoreOutput


@dataclass
class RequestOutput:
    """A request's prompt and its samples; `finished` says that no more will come."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # of the first token there is none
    num_cached_tokens: int | None = None

    def add(self, answer: Mapping[str, Any]) -> None:
        """Takes a response, or one event of a stream."""
        for choice in answer["choices"]:
            self.outputs[choice["index"]].add(choice)
            self.prompt_token_ids = choice.get("prompt_token_ids") or self.prompt_token_ids
            if (table := choice.get("prompt_logprobs")) is not None:
                self.prompt_logprobs = [row and _of_prompt(row) for row in table]
        if usage := answer.get("usage"):
            self.num_cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]

    def end(self, reason: str) -> None:
        """Ends the output: samples that have no finish reason get this one."""
        self.finished = True
        for sample in self.outputs:
            sample.finish_reason = sample.finish_reason or reason
