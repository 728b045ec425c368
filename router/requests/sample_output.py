"""What the client sees of one sample: text without stop strings, token ids, log-probabilities, finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tandem.engine.contracts.wire.parts import FinishReason, TokenLogprobs
from tandem.router.requests.actions import EmitTokens
from tandem.router.text.detokenizer import Detokenizer, StopSearch
from tandem.router.text.tokenizer import TokenIdNames, Tokenizer

TokenNames = Tokenizer | TokenIdNames
LOWEST_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(slots=True)
class TextLogprobs:
    """OpenAI's log-probability object, one entry per token; offsets are characters of the choice's text."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def append(
        self, tokenizer: TokenNames, token_id: int, entry: TokenLogprobs | None, num_top: int, offset: int
    ) -> None:
        text = tokenizer.token_text(token_id)
        self.tokens.append(text)
        self.text_offset.append(offset)
        if entry is None:
            self.token_logprobs.append(None)
            self.top_logprobs.append(None)
            return
        chosen = max(entry.logprobs[0], LOWEST_LOGPROB)
        top = {text: chosen}
        for other, logprob in zip(entry.token_ids[1 : 1 + num_top], entry.logprobs[1 : 1 + num_top], strict=True):
            top.setdefault(tokenizer.token_text(other), max(logprob, LOWEST_LOGPROB))
        self.token_logprobs.append(chosen)
        self.top_logprobs.append(top)

    def extend(self, other: TextLogprobs) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset


@dataclass(slots=True)
class ChatLogprobs:
    """Log-probabilities as chat has them: one object per token, the most likely ones as rows."""

    content: list[dict[str, Any]] = field(default_factory=list)
    refusal: None = None

    def append(
        self, tokenizer: TokenNames, token_id: int, entry: TokenLogprobs | None, num_top: int, offset: int
    ) -> None:
        if entry is None:
            return
        likely = zip(entry.token_ids[1 : 1 + num_top], entry.logprobs[1 : 1 + num_top], strict=True)
        top = [self._row(tokenizer, other, logprob) for other, logprob in likely]
        self.content.append(self._row(tokenizer, token_id, entry.logprobs[0]) | {"top_logprobs": top})

    @staticmethod
    def _row(tokenizer: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": tokenizer.chat_text(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    def extend(self, other: ChatLogprobs) -> None:
        self.content += other.content


@dataclass(slots=True)
class Piece:
    """What one token delta adds to a choice. `text` may be empty: held back, or the middle of a character."""

    text: str
    token_ids: Sequence[int]
    logprobs: TextLogprobs | ChatLogprobs | None
    finish_reason: FinishReason | None
    scores: dict[str, float] | None = None  # of a whole output that beams found, as clients read them
    ends: list[int] = field(default_factory=list)  # of each token's share of the text, but of the last

    def texts(self) -> list[str]:
        """The text token by token."""
        if not self.ends:
            return [self.text]
        return [self.text[begin:end] for begin, end in pairwise([0, *self.ends, len(self.text)])]


class SampleOutput:
    """Turns one sample's tokens into what its client sees. It is fed the machine's EmitTokens in order; `stopped` is
    True once a stop string has ended the sample."""

    def __init__(
        self,
        tokenizer: TokenNames,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        num_logprobs: int | None,
        min_tokens: int,
        text_offset: int,
        make_logprobs: Callable[[], TextLogprobs | ChatLogprobs] = TextLogprobs,
        shows_stop: bool = False,
        length_penalty: float = 1.0,
    ) -> None:
        self._tokenizer, self._detokenizer, self._make_logprobs = tokenizer, detokenizer, make_logprobs
        self._search, self._shows_stop = StopSearch(stops, shows_stop), shows_stop
        self._num_logprobs, self._min_tokens = num_logprobs, min_tokens
        self._offset = text_offset  # kept for log-probabilities alone
        self._length_penalty = length_penalty
        self._is_plain = num_logprobs is None and not stops
        self.stopped = False
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.sum_logprobs = 0.0

    def feed(self, emitted: EmitTokens) -> Piece | None:
        """What these tokens add to the choice; None when the sample had ended before."""
        if self.finish_reason is not None:
            return None
        if self._is_plain and emitted.finish_reason is None and emitted.logprobs is None:
            text, ends = "", []
            for token_id in emitted.token_ids:
                text += self._detokenizer.feed(token_id)
                ends.append(len(text))
            self.num_tokens += len(ends)
            return Piece(text, emitted.token_ids, None, None, None, ends[:-1])
        piece = Piece("", emitted.token_ids, None if self._num_logprobs is None else self._make_logprobs(), None)
        if emitted.cumulative_logprob is not None:
            piece.scores = self._scores(emitted.cumulative_logprob, len(emitted.token_ids))
        last = len(emitted.token_ids) - 1
        for i, token_id in enumerate(emitted.token_ids):
            if i:
                piece.ends.append(len(piece.text))
            self._note_logprobs(piece, token_id, None if emitted.logprobs is None else emitted.logprobs[i])
            self.num_tokens += 1
            if i == last and emitted.stop_token_id is not None and not self._shows_stop:
                break  # a token that ends the output is no part of its text
            if self._add_text(piece, self._detokenizer.feed(token_id)):
                piece.token_ids = emitted.token_ids[: i + 1]
                break
        if (
            not self.stopped
            and emitted.finish_reason is not None
            and not self._add_text(piece, self._detokenizer.flush())
        ):
            piece.text += self._search.flush()
            self.finish_reason = emitted.finish_reason
        piece.finish_reason = self.finish_reason
        return piece

    def _scores(self, cumulative_logprob: float, num_tokens: int) -> dict[str, float]:
        score = cumulative_logprob / num_tokens**self._length_penalty
        return {"cumulative_logprob": cumulative_logprob, "score": score}

    def _add_text(self, piece: Piece, text: str) -> bool:
        """Adds text to a piece. True: the text completed a stop string, and the sample ends here."""
        self._offset += len(text)
        if self.num_tokens <= self._min_tokens:
            piece.text += text
            return False
        visible, self.stopped = self._search.feed(text)
        piece.text += visible
        if self.stopped:
            self.finish_reason = "stop"
        return self.stopped

    def _note_logprobs(self, piece: Piece, token_id: int, entry: TokenLogprobs | None) -> None:
        if entry is not None:
            self.sum_logprobs += entry.logprobs[0]
        if piece.logprobs is not None:
            assert self._num_logprobs is not None
            piece.logprobs.append(self._tokenizer, token_id, entry, self._num_logprobs, self._offset)

    @property
    def mean_logprob(self) -> float:
        return self.sum_logprobs / max(1, self.num_tokens)


def echo_logprobs(
    tokenizer: TokenNames, prompt_token_ids: list[int], entries: Sequence[TokenLogprobs], num_top: int
) -> TextLogprobs:
    """The prompt's half of the log-probability object; its first token has no prediction."""
    logprobs, offset = TextLogprobs(), 0
    detokenizer = tokenizer.detokenizer([])
    for position, token_id in enumerate(prompt_token_ids):
        entry = entries[position - 1] if 0 < position <= len(entries) else None
        logprobs.append(tokenizer, token_id, entry, num_top, offset)
        offset += len(detokenizer.feed(token_id))
    return logprobs


def prompt_logprobs_table(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """The extension `prompt_logprobs`: per position token id -> log-probability, rank, text; None for the first, and
    where there is no token but a part of an image or a sound."""
    table: list[dict[str, dict[str, Any]] | None] = [None]
    for position_token_id, entry in zip(prompt_token_ids[1:], entries, strict=False):
        if position_token_id < 0:
            table.append(None)
            continue
        row: dict[str, dict[str, Any]] = {}
        for i, (token_id, logprob) in enumerate(
            zip(entry.token_ids[: 1 + num_top], entry.logprobs[: 1 + num_top], strict=True)
        ):
            row.setdefault(
                str(token_id),
                {
                    "logprob": max(logprob, LOWEST_LOGPROB),
                    "rank": i if i else entry.rank,
                    "decoded_token": tokenizer.token_text(token_id),
                },
            )
        table.append(row)
    return table
