"""Reasoning between `<think>` and `</think>`, at the beginning of an answer alone."""

from __future__ import annotations

from tandem.router.chat.deltas import Delta, OutputParser, Reasoning
from tandem.router.chat.incoming import Incoming, Reader

BEGIN, END = "<think>", "</think>"


class ThinkingParser:
    """Takes reasoning from the beginning of an answer and gives the rest to `inner`. `is_open`: the answer begins in
    the reasoning, without `<think>`. White space around reasoning belongs to neither side."""

    def __init__(self, inner: OutputParser, is_open: bool) -> None:
        self._inner, self.is_reasoning = inner, is_open
        self._in = Incoming()
        self._deltas: list[Delta] = []
        self._reader = self._read()

    def feed(self, text: str) -> list[Delta]:
        self._in.add(text)
        return self._read_on()

    def finish(self) -> list[Delta]:
        self._in.close()
        return [*self._read_on(), *self._inner.finish()]

    def _read_on(self) -> list[Delta]:
        next(self._reader, None)
        deltas, self._deltas = self._deltas, []
        return deltas

    def _read(self) -> Reader[None]:
        spaces = yield from self._in.spaces()
        self.is_reasoning |= yield from self._in.literal(BEGIN)
        if self.is_reasoning:
            yield from self._in.spaces()
            yield from self._in.until((END,), self._reasoning, trim=True, trim_end=True)
            self.is_reasoning = False
            yield from self._in.spaces()
        else:
            self._content(spaces)
        yield from self._in.rest(self._content)

    def _reasoning(self, text: str) -> None:
        self._deltas.append(Reasoning(text))

    def _content(self, text: str) -> None:
        self._deltas += self._inner.feed(text)
