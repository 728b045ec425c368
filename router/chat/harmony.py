"""GPT-OSS's messages: `<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`.

One parser for reasoning and calls, since channels tell both. A call is a message to `functions.<name>`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Set

from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.deltas import Reasoning
from tandem.router.chat.incoming import Reader
from tandem.router.structured.calls import CallForm

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."


class HarmonyParser(CallParser):
    """The prompt ends with `<|start|>assistant`, so the text begins within a header. With `splits_reasoning` False
    analysis is content; `has_calls` False: calls are, too."""

    markers = (CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def __init__(self, names: Set[str], splits_reasoning: bool = True, has_calls: bool = True) -> None:
        self._splits_reasoning, self._has_calls = splits_reasoning, has_calls
        self._is_reasoning = splits_reasoning  # its first message is, as a rule
        super().__init__(names)

    @property
    def is_reasoning(self) -> bool:
        return self._is_reasoning

    @classmethod
    def form(cls, template: str, marks: Container[str]) -> CallForm:
        return CallForm(f"commentary to={FUNCTIONS}{{name}} {CONSTRAIN}json{MESSAGE}", mark=CHANNEL)

    def _reasoning(self, text: str) -> None:
        self._deltas.append(Reasoning(text))

    def _read(self) -> Reader[None]:
        if (yield from self._begins_plainly()):
            self._is_reasoning = False
            yield from self._in.rest(self._content)
            return
        while (yield from self._in.peek()):
            header: list[str] = []
            if not (yield from self._in.until((MESSAGE,), header.append)):
                self._content("".join(header))  # a header that never ended
                return
            yield from self._body("".join(header))
            yield from self._in.spaces()

    def _begins_plainly(self) -> Reader[bool]:
        """Whether the text has no header: it begins neither with a mark nor with a recipient."""
        yield from self._in.spaces()
        first = yield from self._in.peek()
        return bool(first) and first not in "<t"

    def _body(self, header: str) -> Reader[None]:
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        emit = self._content
        self._is_reasoning = False
        if recipient and recipient[1].startswith(FUNCTIONS) and len(recipient[1]) > len(FUNCTIONS) and self._has_calls:
            self._start(recipient[1].removeprefix(FUNCTIONS))
            emit = self._arguments
        elif self._splits_reasoning and (recipient or (channel and channel[1] == "analysis")):
            self._is_reasoning = True
            emit = self._reasoning
        yield from self._in.until(ENDS, emit)
