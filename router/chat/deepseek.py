"""Calls as DeepSeek V3, R1 and V3.1 write them, between marks of their own.

V3 and R1: `…call▁begin｜>function<｜tool▁sep｜>name`, a line break, the arguments in a fence, `<｜tool▁call▁end｜>`.
V3.1: `…call▁begin｜>name<｜tool▁sep｜>{…}<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

from collections.abc import Container

from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.incoming import Reader
from tandem.router.structured.calls import CallForm

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "```json", "```"


class DeepSeekParser(CallParser):
    """Reads DeepSeek's calls out of output text; what is no whole call is content."""

    markers = (BEGIN, END, CALL, SEPARATOR, CALL_END)

    @classmethod
    def form(cls, template: str, marks: Container[str]) -> CallForm:
        before, after, between = f"{CALL}{{name}}{SEPARATOR}", CALL_END, ""
        if FENCE in template:
            before, after = f"{CALL}function{SEPARATOR}{{name}}\n{FENCE}\n", f"\n{FENCE_END}{CALL_END}"
            between = "\n"
        return CallForm(before, after, BEGIN, between, is_list=True, closing=END)

    def _read(self) -> Reader[None]:
        while (yield from self._content_until(BEGIN)):
            unsaid = self._in.trimmed + BEGIN  # this is content, if no call follows
            while True:
                spaces = yield from self._in.spaces()
                if not (yield from self._in.literal(CALL)):
                    if not (yield from self._in.literal(END)) and unsaid:
                        self._content(unsaid + spaces)
                    break
                if not (yield from self._call(unsaid + spaces + CALL)):
                    break
                unsaid = ""

    def _call(self, prefix: str) -> Reader[bool]:
        """Reads a call; returns whether it was whole."""
        parts: list[str] = []
        if not (yield from self._in.until((SEPARATOR,), parts.append)):
            self._content(prefix + "".join(parts))
            return False
        name = "".join(parts).strip()
        raw = "".join(parts) + SEPARATOR + (yield from self._in.spaces())
        if (yield from self._in.peek()) != "{":  # then what was read is the tool's kind, and its name follows
            parts.clear()
            if not (yield from self._in.until(("\n",), parts.append)):
                self._content(prefix + raw + "".join(parts))
                return False
            name = "".join(parts).strip()
            raw += "".join(parts) + "\n" + (yield from self._in.spaces())
            if (yield from self._in.literal(FENCE)):
                raw += FENCE + (yield from self._in.spaces())
        if not name or (yield from self._in.peek()) != "{":
            self._content(prefix + raw)
            return False
        self._start(name)
        if not (yield from self._in.json_value(self._arguments)):
            return False
        yield from self._in.spaces()
        yield from self._in.literal(FENCE_END)
        yield from self._literal_or_content(CALL_END)
        return True
