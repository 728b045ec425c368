"""Listeners that take the output of one HTTP request: a collector of the whole, or a stream of events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from tandem.engine.contracts.errors import TandemError
from tandem.engine.contracts.wire.parts import TokenLogprobs
from tandem.router.http import responses
from tandem.router.http.asked import Asked
from tandem.router.http.responses import AnswerChoice
from tandem.router.requests.generation import Generation
from tandem.router.requests.sample_output import Piece, echo_logprobs, prompt_logprobs_table
from tandem.router.text.completion import echo_text
from tandem.router.text.tokenizer import Tokenizer, names_of


class _Listener:
    """What both kinds share: counting the prompts that are under way, and the echo of a prompt."""

    def __init__(
        self,
        asked: Asked,
        tokenizer: Tokenizer,
    ) -> None:
        self._body, self._plans, self._format = asked.body, asked.plans, asked.format
        self._tokenizer, self._on_pooled = tokenizer, asked.on_pooled
        self._entries: dict[int, tuple[TokenLogprobs, ...]] = {}
        self._num_open = len(asked.plans)
        self._generations: list[Generation] = []

    def follow(self, generations: list[Generation]) -> None:
        """Takes the generations whose output comes here; they have started."""
        self._generations = generations

    def pooled(self, prompt_index: int, values: bytes) -> None:
        self._on_pooled(prompt_index, values)

    def prompt_logprobs(self, prompt_index: int, entries: tuple[TokenLogprobs, ...]) -> None:
        self._entries[prompt_index] = entries

    def _echo(self, prompt_index: int) -> Piece:
        plan, logprobs = self._plans[prompt_index], None
        if self._body.logprobs is not None:
            entries = self._entries.get(prompt_index, ())
            names = names_of(self._tokenizer, self._body.return_tokens_as_token_ids)
            logprobs = echo_logprobs(names, plan.prompt_ids, entries, self._body.logprobs)
        return Piece(echo_text(plan, self._tokenizer), (), logprobs, None)

    def _shown(self, piece: Piece) -> Piece:
        """The piece as the client sees it: with max_tokens = 0 (echo alone) without the one token that was made."""
        if self._body.max_tokens == 0:
            return Piece("", (), None, "length" if piece.finish_reason else None)
        return piece

    def _usage(self) -> dict[str, Any]:
        shown = self._body.max_tokens != 0
        counted = responses.usage(
            sum(plan.num_prompt_tokens for plan in self._plans),
            sum(sample.num_tokens for g in self._generations for sample in g.samples) if shown else 0,
            sum(min(g.machine.num_cached_tokens, g.plan.num_prompt_tokens) for g in self._generations),
        )
        return counted | self._format.usage_details()


class Collector(_Listener):
    """Gathers the whole response; `done` resolves to its body or raises the error that ended the request."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._choices = [[self._format.choice() for _ in range(self._body.num_generated)] for _ in self._plans]

    def piece(self, prompt_index: int, sample_index: int, piece: Piece) -> None:
        self._choices[prompt_index][sample_index].add(self._shown(piece))

    def failed(self, prompt_index: int, error: TandemError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def finished(self, prompt_index: int) -> None:
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(self._response())

    def _response(self) -> bytes:
        returned = [(i, choice) for i in range(len(self._plans)) for choice in self._returned(i)]
        choices = [self._complete(i, index, choice) for index, (i, choice) in enumerate(returned)]
        return self._format.whole(choices, self._usage())

    def _returned(self, prompt_index: int) -> list[AnswerChoice]:
        """The best `n` samples by mean log-probability, in the order of their quality only if some are left out."""
        samples = self._generations[prompt_index].samples
        order = list(range(len(samples)))
        if len(samples) > self._body.num_samples:
            order.sort(key=lambda i: -samples[i].mean_logprob)
        return [self._choices[prompt_index][i] for i in order[: self._body.num_samples]]

    def _complete(self, prompt_index: int, index: int, choice: AnswerChoice) -> dict[str, Any]:
        complete = choice.as_dict(index, self._echo(prompt_index) if self._body.echo else None)
        if self._body.return_token_ids:
            complete["prompt_token_ids"] = self._plans[prompt_index].prompt_ids
        if self._body.prompt_logprobs is not None:
            complete["prompt_logprobs"] = prompt_logprobs_table(
                self._tokenizer,
                self._plans[prompt_index].token_ids.tolist(),
                self._entries.get(prompt_index, ()),
                self._body.prompt_logprobs,
            )
        return complete


class ChunkWriter(Protocol):
    """Whatever a stream's events are written to."""

    def write_chunk(self, body: bytes) -> bool:
        """Writes a part of the response. Returns False, and writes nothing, when that isn't possible now."""


class EventStream(_Listener):
    """Server-sent events through a bounded queue; a client that does not read makes it overflow, once.

    Each turn of the event loop makes one write. An event of a single choice is written at once, past the queue, if the
    response has begun and nothing waits; the events of several choices are gathered first.

    `next_batch` returns what waits, b"" at the end; it raises the error of a request that failed before its first
    event, so that it can still become an HTTP status.
    """

    def __init__(self, *arguments: Any, client: ChunkWriter, limit: int, on_overflow: Callable[[], object]) -> None:
        super().__init__(*arguments)
        self._client = client
        self._is_single = len(self._plans) * self._body.num_samples == 1
        self._has_begun = False
        options = self._body.stream_options
        self._is_counting = bool(options and options.include_usage and options.continuous_usage_stats)
        self._writer = self._format.writer()
        self._limit, self._on_overflow = limit, on_overflow
        self._events: deque[bytes] = deque()
        self._wakeup: asyncio.Future[None] | None = None
        self._seen: set[int] = set()  # choices that have begun
        self._closed = False
        self._early_error: TandemError | None = None
        self._has_output = False

    def begin(self) -> None:
        """Notes that the response has begun, so that events may be written past the queue."""
        self._has_begun = True

    def piece(self, prompt_index: int, sample_index: int, piece: Piece) -> None:
        index = prompt_index * self._body.num_samples + sample_index
        extra = self._first_of(prompt_index, index) if index not in self._seen else None
        usage = self._usage() if self._is_counting else None
        event = self._writer.piece(index, self._shown(piece), extra, usage)
        if event:
            self._push(event)

    def _first_of(self, prompt_index: int, index: int) -> dict[str, Any] | None:
        """Begins a choice: sends its echo as an event of its own, or returns fields for its first event."""
        self._seen.add(index)
        extra: dict[str, Any] | None = None
        if self._body.return_token_ids:
            extra = {"prompt_token_ids": self._plans[prompt_index].prompt_ids}
        if self._body.echo:
            self._push(self._writer.piece(index, self._echo(prompt_index), extra))
            return None
        return extra

    def finished(self, prompt_index: int) -> None:
        self._num_open -= 1
        if self._num_open or self._closed:
            return
        self._push(self._writer.end(self._usage()))
        self._close()

    def failed(self, prompt_index: int, error: TandemError) -> None:
        if self._closed:
            return
        if self._has_output:
            self._push(self._writer.failed(error))
        else:
            self._early_error = error
        self._close()

    async def next_batch(self) -> bytes:
        while not self._events:
            if self._early_error is not None:
                raise self._early_error
            if self._closed:
                return b""
            self._wakeup = asyncio.get_running_loop().create_future()
            await self._wakeup
            self._wakeup = None
        batch = b"".join(self._events)
        self._events.clear()
        return batch

    def _push(self, event: bytes) -> None:
        if self._closed:
            return
        if self._may_pass() and self._client.write_chunk(event):
            return
        if len(self._events) >= self._limit:
            self._close()
            self._on_overflow()
            return
        self._has_output = True
        self._events.append(event)
        self._wake()

    def _may_pass(self) -> bool:
        """Whether an event may be written past the queue: nothing waits, and the endpoint waits for more."""
        return self._is_single and self._has_begun and self._wakeup is not None and not self._events

    def _close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
