"""What a request may hold its output to, compiled for one model's tokenizer. No torch.

A grammar is text as llguidance reads it: Lark, or a JSON object with a list of Lark grammars and JSON schemas.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

MAX_GRAMMAR_BYTES = 1 << 18  # a guess, as the next three: far above what people write, and bounded for nodes
MAX_LEXER_STATES = 1 << 16  # of one grammar, 1 to 2 KB each
MAX_KEPT = 64
MAX_THREADS = 8
MAX_SHOWN = 400  # characters of an error
# A remedy of llguidance's that is its caller's, and what a client can do instead.
REWORDED = (
    "Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "Take anyOf, or have its branches plainly apart: of other types, or objects with a required const each",
)


class Grammars:
    """Compiles grammars and keeps the latest. Any thread may ask; others run meanwhile, but for `prepare`."""

    def __init__(self, folder: Path, vocab_size: int = 0, eos_token_ids: Sequence[int] = ()) -> None:
        """`vocab_size` is the width of the logits, which may exceed the tokenizer's; 0: the tokenizer's, for callers
        that want no masks."""
        self._folder, self._vocab_size, self.eos_token_ids = folder, vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def __contains__(self, grammar: str) -> bool:
        return grammar in self._kept

    def prepare(self, grammar: str = 'start: "a"') -> None:
        """Compiles a grammar, so that its later users need not. The first one loads the library and the tokenizer: for
        a large vocabulary that keeps all Python threads of the process waiting for a second."""
        with contextlib.suppress(ValueError):  # whoever brings the grammar gets the same error
            self.matcher(grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of the caller's own, at its beginning. Raises ValueError that says why it can't be followed."""
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None:
                self._kept.move_to_end(grammar)
        if kept is None:
            kept = self._compile(grammar)
            with self._lock:
                self._kept[grammar] = kept
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        if kept.is_error():
            raise ValueError(shown(kept.get_error()))
        return kept.deep_copy()

    @property
    def num_words(self) -> int:
        """Words of 32 bits in the mask of one row."""
        return -(-self._vocab_size // 32)

    @cached_property
    def executor(self) -> LLExecutor:
        """The threads that fill masks."""
        from llguidance import LLExecutor

        return LLExecutor(num_threads=min(MAX_THREADS, os.cpu_count() or 1))

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        if len(grammar.encode(errors="replace")) > MAX_GRAMMAR_BYTES:
            raise ValueError(f"a grammar may have {MAX_GRAMMAR_BYTES} bytes at most")
        limits = LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
        found = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not found.is_error():
            begun = found.deep_copy()
            begun.compute_bitmask()
            if begun.is_error():
                raise ValueError("no text begins as it asks, as none does where it refers to itself alone")
        return found

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        try:
            text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=self._vocab_size or None, eos_token=self.eos_token_ids or None)
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"this model's tokenizer knows no grammars: {shown(str(error))}") from error


def shown(error: str) -> str:
    """What a client may read of a matcher's error: what is wrong and what to do, not the parser's state."""
    return error.partition("\n<state>")[0].strip().replace(*REWORDED)[:MAX_SHOWN]
