"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Container

from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.incoming import Reader
from tandem.router.structured.calls import CallForm

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Reads calls between `<tool_call>` tags out of output text."""

    markers = (BEGIN, END)

    @classmethod
    def form(cls, template: str, marks: Container[str]) -> CallForm:
        return CallForm('\n{"name": {json}, "arguments": ', f"}}\n{END}", BEGIN, separator="\n")

    def _read(self) -> Reader[None]:
        while (yield from self._content_until(BEGIN)):
            if (yield from self._call_or_content(self._in.trimmed + BEGIN)):
                yield from self._literal_or_content(END)
