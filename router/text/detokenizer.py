"""Token ids to text, token by token, and the search for stop strings in that text.

The concatenation of everything that a detokenizer returns equals the decoding of all its tokens at once, and no
character is returned before all of its tokens are known.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Turns one sample's token ids into text as they come."""

    def feed(self, token_id: int) -> str:
        """Text that is certain after this token; often "" in the middle of a character."""

    def flush(self) -> str:
        """What is left at the end of an incomplete character, as U+FFFD."""


class ByteDetokenizer:
    """Detokenizes byte-level BPE, where each token stands for a fixed run of bytes.

    Both lists are indexed by token id; `token_texts` has None for tokens that are not whole characters.
    """

    def __init__(self, token_bytes: Sequence[bytes], token_texts: Sequence[str | None]) -> None:
        self._token_bytes, self._token_texts = token_bytes, token_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False  # a character

    def feed(self, token_id: int) -> str:
        if token_id >= len(self._token_bytes):
            return ""
        if not self._is_inside:
            text = self._token_texts[token_id]
            if text is not None:
                return text
        text = self._decoder.decode(self._token_bytes[token_id])
        self._is_inside = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """Detokenizes for any other tokenizer: compares the decodings of a short window of tokens with and without the new
    one.

    Text that ends in U+FFFD may still become a character, so it waits, at most `MAX_HELD` tokens (no character has
    more than four bytes).
    """

    MAX_HELD = 8  # a guess: twice the most bytes of a character

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(context)
        self._num_emitted = len(self._window)  # tokens of the window whose text is out

    def feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        held = len(self._window) - self._num_emitted
        if held < self.MAX_HELD and (not text or text.endswith(REPLACEMENT)):
            return ""
        del self._window[: self._num_emitted]
        self._num_emitted = len(self._window)
        return text

    def flush(self) -> str:
        text = self._new_text()
        self._num_emitted = len(self._window)
        return text

    def _new_text(self) -> str:
        known = self._decode(self._window[: self._num_emitted])
        return self._decode(self._window)[len(known) :]


class MarkedDetokenizer:
    """Any other detokenizer, and the texts of some special tokens between what it returns."""

    def __init__(self, inner: Detokenizer, texts: Mapping[int, str]) -> None:
        self._inner, self._texts = inner, texts

    def feed(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        return self._inner.feed(token_id) if text is None else self._inner.flush() + text

    def flush(self) -> str:
        return self._inner.flush()


class StopSearch:
    """Finds the first stop string to be completed, across borders of tokens; `feed` returns (text, found).

    Only what may be the beginning of a stop string is held back; the text ends before the stop string, or with it if
    it `is_shown`.
    """

    def __init__(self, stops: Sequence[str], is_shown: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops, self._is_shown = tuple(stops), is_shown
        self._longest = max(map(len, stops), default=0)
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        if not self._stops or not text:
            return text, False
        window = self._held + text
        found = self._first_completed(window)
        if found is not None:
            self._held = ""
            return window[:found], True
        keep = self._beginning_at_end(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep], False

    def flush(self) -> str:
        text, self._held = self._held, ""
        return text

    def _first_completed(self, window: str) -> int | None:
        """Where the text is cut: by the match that ends first (the longest of those), as if characters came one by
        one."""
        matches = [(at + len(stop), at) for stop in self._stops if (at := window.find(stop)) >= 0]
        return min(matches)[0 if self._is_shown else 1] if matches else None

    def _beginning_at_end(self, window: str) -> int:
        for length in range(min(self._longest - 1, len(window)), 0, -1):
            tail = window[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
