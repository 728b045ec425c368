"""Transcripts as OpenAI's clients read them: one text of all windows, whole or as it comes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from tandem.engine.contracts.errors import TandemError
from tandem.router.requests.sample_output import Piece
from tandem.router.text.openai_api import error_body

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Heard:
    """What was heard. `windows`: seconds of each."""

    task: Literal["transcribe", "translate"]
    language: str
    windows: tuple[float, ...]
    temperature: float

    @property
    def duration(self) -> float:
        return sum(self.windows)

    def usage(self) -> dict[str, Any]:
        return {"type": "duration", "seconds": math.ceil(self.duration)}


class TranscriptFormat:
    """Writes a transcript as text, json or verbose_json, the windows' texts joined."""

    def __init__(self, heard: Heard, response_format: str) -> None:
        self._heard, self._format = heard, response_format

    @property
    def content_type(self) -> bytes:
        return b"text/plain; charset=utf-8" if self._format == "text" else b"application/json"

    def choice(self) -> WindowText:
        return WindowText()

    def whole(self, choices: list[dict[str, Any]], usage_dict: dict[str, Any]) -> bytes:
        text = "".join(choice["text"] for choice in choices).strip()
        if self._format == "text":
            return text.encode() + b"\n"
        if self._format == "json":
            return _encode({"text": text, "usage": self._heard.usage()})
        heard = self._heard
        return _encode(
            {
                "task": heard.task,
                "language": heard.language,
                "duration": heard.duration,
                "text": text,
                "segments": [self._segment(index, choice) for index, choice in enumerate(choices)],
                "usage": heard.usage(),
            }
        )

    def _segment(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        start = sum(self._heard.windows[:index])
        return {
            "id": index,
            "seek": 0,
            "start": start,
            "end": start + self._heard.windows[index],
            "text": choice["text"],
            "tokens": choice["token_ids"],
            "temperature": self._heard.temperature,
        }

    def writer(self) -> TranscriptWriter:
        return TranscriptWriter(self._heard)

    def usage_details(self) -> dict[str, Any]:
        return {}


@dataclass(slots=True)
class WindowText:
    """What was heard in one window."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        self.text.append(piece.text)
        self.token_ids += piece.token_ids

    def as_dict(self, index: int, echo: Piece | None) -> dict[str, Any]:
        return {"text": "".join(self.text), "token_ids": self.token_ids}


class TranscriptWriter:
    """Writes a stream's events. Windows are computed side by side: what a later one says waits until those before it
    have ended."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._current = 0
        self._texts = [""] * len(heard.windows)
        self._ended = [False] * len(heard.windows)
        self._sent: list[str] = []

    def piece(
        self, index: int, piece: Piece, extra: dict[str, Any] | None = None, usage: dict[str, Any] | None = None
    ) -> bytes:
        self._texts[index] += piece.text
        self._ended[index] = self._ended[index] or piece.finish_reason is not None
        events = []
        while self._current < len(self._texts):
            delta, self._texts[self._current] = self._texts[self._current], ""
            if not self._sent:
                delta = delta.lstrip()
            if delta:
                self._sent.append(delta)
                events.append(_event("transcript.text.delta", delta=delta))
            if not self._ended[self._current]:
                break
            self._current += 1
        return b"".join(events)

    def end(self, usage_dict: dict[str, Any]) -> bytes:
        return _event("transcript.text.done", text="".join(self._sent).strip(), usage=self._heard.usage())

    def failed(self, error: TandemError) -> bytes:
        return b"data: " + error_body(error) + b"\n\n"


def _event(kind: str, **fields: Any) -> bytes:
    return b"data: " + _encode({"type": kind, **fields}) + b"\n\n"
