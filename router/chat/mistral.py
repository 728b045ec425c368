"""Calls as Mistral's models write them: `[TOOL_CALLS][{…}, {…}]`, newer ones `[TOOL_CALLS]name[ARGS]{…}` for each."""

from __future__ import annotations

from collections.abc import Container

from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.incoming import Reader
from tandem.router.structured.calls import CallForm

BEGIN, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(CallParser):
    """Reads Mistral's calls, arrays of them as well as named ones."""

    markers = (BEGIN, ID, ARGS)
    has_short_ids = True

    @classmethod
    def form(cls, template: str, marks: Container[str]) -> CallForm:
        if ARGS in marks:
            return CallForm("{name}" + ARGS, mark=BEGIN)
        return CallForm('{"name": {json}, "arguments": ', "}", BEGIN, ", ", is_list=True, opening="[", closing="]")

    def _read(self) -> Reader[None]:
        while (yield from self._content_until(BEGIN)):
            prefix = self._in.trimmed + BEGIN + (yield from self._in.spaces())
            first = yield from self._in.peek()
            if first == "{":
                yield from self._call_or_content(prefix)
            elif first == "[":
                yield from self._array(prefix + self._in.take())
            else:
                yield from self._named(prefix)

    def _array(self, prefix: str) -> Reader[None]:
        while (yield from self._call_or_content(prefix)):
            prefix = yield from self._in.spaces()
            if (yield from self._in.literal("]")):
                return
            if not (yield from self._in.literal(",")):
                self._content(prefix)
                return
            prefix += ","

    def _named(self, prefix: str) -> Reader[None]:
        """Reads `name[ARGS]{…}`, with `[CALL_ID]…` before the arguments in some versions, or without any mark."""
        read: list[str] = [prefix]
        name = ""
        while (char := (yield from self._in.peek())) and (char.isalnum() or char in "_-."):
            name += self._in.take()
        read.append(name)
        if (yield from self._in.literal(ID)):
            read.append(ID)
            while (char := (yield from self._in.peek())) and char.isalnum():
                read.append(self._in.take())
        if (yield from self._in.literal(ARGS)):
            read.append(ARGS)
        read.append((yield from self._in.spaces()))
        if not name or (yield from self._in.peek()) != "{":
            self._content("".join(read))
            return
        self._start(name)
        yield from self._in.json_value(self._arguments)
