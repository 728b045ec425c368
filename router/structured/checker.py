"""Grammars, compiled as the nodes will, so that what can't be followed is a 400 that says why."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.structured.grammars import MAX_GRAMMAR_BYTES, Grammars
from tandem.router.structured.calls import ARGUMENTS
from tandem.router.structured.parts import Part


class GrammarChecker:
    """Compiles grammars before a request is taken; one per process, on its event loop. What takes long runs on a
    thread."""

    def __init__(self, folder: Path) -> None:
        self._grammars = Grammars(folder)
        self._grammars.prepare()

    async def check(self, parts: Sequence[Part], param: str) -> str:
        """The grammar of these parts, as nodes get it. Raises InvalidRequestError that names `param`."""
        grammar = msgspec.json.encode({"grammars": parts}).decode()
        if len(grammar) > MAX_GRAMMAR_BYTES:
            self._refuse(param, f"as a grammar it has {len(grammar)} bytes; at most {MAX_GRAMMAR_BYTES} are followed")
        try:
            if grammar in self._grammars:
                self._grammars.matcher(grammar)
            else:
                await asyncio.to_thread(self._grammars.matcher, grammar)
        except ValueError as error:
            at_fault = next((part for part in parts if "name" in part and not _holds(part)), {}).get("name", "")
            self._refuse("tools" if at_fault.startswith(ARGUMENTS) else param, str(error))
        return grammar

    @staticmethod
    def _refuse(param: str, why: str) -> NoReturn:
        raise InvalidRequestError(f"{param} can't be followed: {why}", param=param)


def _holds(part: Part) -> bool:
    """Whether a part can be followed by itself; one that names others holds with them."""
    from llguidance import LLMatcher

    if "json_schema" not in part:
        return True
    return not LLMatcher.validate_grammar(msgspec.json.encode({"grammars": [part]}).decode())
