"""Calls as Hermes, Qwen2.5 and Qwen3 write them: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""

from __future__ import annotations

from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.incoming import Reader

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    markers = (BEGIN, END)

    def _read(self) -> Reader[None]:
        while (yield from self._content_until(BEGIN)):
            if (yield from self._call_or_content(self._in.trimmed + BEGIN)):
                yield from self._literal_or_content(END)
