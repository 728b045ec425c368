"""Calls as Llama 3 writes them: the whole answer is `{"name": …, "parameters": {…}}`, or several with `;` between.

There is no mark of a call but that the answer begins with one, so only names of tools that there are count.
"""

from __future__ import annotations

from collections.abc import Container

from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.incoming import Reader
from tandem.router.structured.calls import CallForm

TAG = "<|python_tag|>"


class LlamaParser(CallParser):
    """Reads Llama 3's calls: an answer that begins with one holds nothing else until they end."""

    markers = (TAG,)

    @classmethod
    def form(cls, template: str, marks: Container[str]) -> CallForm:
        return CallForm('{"name": {json}, "parameters": ', "}", separator="; ")

    def _read(self) -> Reader[None]:
        prefix = yield from self._in.spaces()
        if (yield from self._in.literal(TAG)):
            prefix += TAG
        while (yield from self._call_or_content(prefix, is_known_only=True)):
            prefix = yield from self._in.spaces()
            if not (yield from self._in.literal(";")):
                break
            prefix += ";"
        yield from self._in.until((), self._content, trim_end=self._num_calls > 0)
