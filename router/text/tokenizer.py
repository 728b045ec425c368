"""Text to token ids and back, from the model folder's tokenizer.json.

Which special tokens an encoded prompt gets is what tokenizer.json's post-processor says, as in transformers, which
ignores `add_bos_token` and `add_eos_token` of tokenizer_config.json when there is a tokenizer.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from tandem.engine.contracts.errors import ConfigError
from tandem.router.text.detokenizer import ByteDetokenizer, Detokenizer, MarkedDetokenizer, WindowDetokenizer

# Batches here are of one text: the library's own threads, one for each core, would have nothing to share. It reads this
# when a batch is made.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
PROMPT_TAIL = 6  # prompt tokens that give a decoder its context; a guess


def _bytes_of_unicode() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable bytes stand for themselves, the others for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Tokenizer:
    """The tokenizer of a model folder. Raises ConfigError when the folder has no usable tokenizer.json."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; give a folder in Hugging Face format")
        try:
            self._tokenizer = RustTokenizer.from_file(str(path))
        except Exception as error:  # the Rust side raises bare Exception
            raise ConfigError(f"{path} can't be read as a tokenizer: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._is_byte_level = _is_byte_level(json.loads(self._tokenizer.to_str())["decoder"])
        self.detokenizer([])  # makes the tables now, not on the first request's time

    @property
    def vocab_size(self) -> int:
        """Ids the tokenizer knows; the model's embedding may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text. Long texts belong on a thread: only the library's batch calls, as here, let other
        Python threads run meanwhile."""
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """A pair's token ids, and where its second text begins among them; 0: the model doesn't tell them apart."""
        found = self._tokenizer.encode_batch([(first, second)])[0]
        return found.ids, next((i for i, kind in enumerate(found.type_ids) if kind == 1), 0)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decodes token ids; as with `encode`, other threads run meanwhile."""
        return self._tokenizer.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling of a token; "" for ids that only pad the embedding."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_text(self, token_id: int) -> str:
        """Text of one token for log-probability reports; `bytes:\\xe2\\x80` when it is no whole character."""
        if not self._is_byte_level:
            return self.decode([token_id], skip_special_tokens=False)
        raw = self.token_bytes(token_id)
        text = _text_of(raw)
        return text if text is not None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def chat_text(self, token_id: int) -> str:
        """The text of one token as chat reports it: what is no whole character as U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, special or not."""
        if not self._is_byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode()
        table = self._token_bytes_with_special
        return table[token_id] if token_id < len(table) else b""

    @property
    def all_special_ids(self) -> frozenset[int]:
        return self._special_ids

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those texts that are special tokens: other text never yields them, and the output lacks theirs."""
        found = (self._tokenizer.token_to_id(text) for text in texts)
        return frozenset(i for i in found if i in self._special_ids)

    @cached_property
    def mark_ids(self) -> dict[str, int]:
        """Texts that a grammar must name as tokens, and their ids: llguidance takes special tokens and added ones in
        angle brackets for no text."""
        added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.content}
        return {text: i for text, i in added.items() if i in self._special_ids or (text[0], text[-1]) == ("<", ">")}

    def detokenizer(self, prompt_token_ids: list[int], shown_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """A fresh incremental detokenizer of output that follows this prompt (its last few tokens are enough). Special
        tokens are no text, but for `shown_ids`."""
        plain: Detokenizer
        if self._is_byte_level:
            plain = ByteDetokenizer(self._token_bytes, self._token_texts)
        else:
            plain = WindowDetokenizer(self.decode, prompt_token_ids[-PROMPT_TAIL:])
        return MarkedDetokenizer(plain, {i: self.token_string(i) for i in shown_ids}) if shown_ids else plain

    @cached_property
    def _token_bytes_with_special(self) -> list[bytes]:
        alphabet = _bytes_of_unicode()
        size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        table = [b""] * size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            try:
                table[token_id] = bytes([alphabet[char] for char in token])
            except KeyError:  # an added token outside the alphabet stands for its own text
                table[token_id] = token.encode()
        return table

    @cached_property
    def _token_bytes(self) -> list[bytes]:
        return [b"" if i in self._special_ids else raw for i, raw in enumerate(self._token_bytes_with_special)]

    @cached_property
    def _token_texts(self) -> list[str | None]:
        return [_text_of(raw) for raw in self._token_bytes]


class TokenIdNames:
    """Names tokens by their ids in reports of log-probabilities, where their texts could not be told apart; the texts
    follow the ids where they are wanted, too."""

    def __init__(self, tokenizer: Tokenizer, with_text: bool) -> None:
        self.token_bytes, self.detokenizer = tokenizer.token_bytes, tokenizer.detokenizer
        self._text = tokenizer.chat_text if with_text else None

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._text is None else f"token_id:{token_id}:{self._text(token_id)}"

    chat_text = token_text


def names_of(tokenizer: Tokenizer, by_id: bool | str | None) -> Tokenizer | TokenIdNames:
    """What names tokens in log-probabilities. `by_id` is the body's field `return_tokens_as_token_ids`."""
    return TokenIdNames(tokenizer, by_id == "with_text") if by_id else tokenizer


def _text_of(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return bool(decoder["decoders"]) and all(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")
