"""Bodies of /v1/audio/transcriptions and /v1/audio/translations: form fields as a structure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.audio.multipart import FormPart
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.openai_api import LEAST_TIMEOUT_S, CompletionBody

TIMES = "the model's timestamps are not read; a transcript's segments are its windows"
REFUSED = {"timestamp_granularities": TIMES, "include": "log-probabilities are not part of transcripts"}
SAY_NOTHING = {("timestamp_granularities", "segment"), ("chunking_strategy", "auto")}


class TranscriptionBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields but `file`. `language` is an ISO 639-1 code; `prompt` is text that may have come before."""

    model: str | None = None
    language: Annotated[str, Meta(max_length=32)] | None = None
    prompt: Annotated[str, Meta(max_length=4096)] = ""
    response_format: Literal["json", "text", "verbose_json"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stream: bool = False
    # extensions
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    timeout: Annotated[float, Meta(ge=LEAST_TIMEOUT_S)] | None = None

    def as_completion(self) -> CompletionBody:
        """The completion of each window."""
        return CompletionBody(
            prompt=msgspec.Raw(b'""'),
            model=self.model,
            temperature=self.temperature,
            stream=self.stream,
            seed=self.seed,
            max_tokens=self.max_completion_tokens,
            priority=self.priority,
            timeout=self.timeout,
        )


def read_fields(bodies: BodyReader, parts: list[FormPart]) -> tuple[TranscriptionBody, bytes]:
    """(the fields, the file's bytes). Raises InvalidRequestError that names the field."""
    files = [part.data for part in parts if part.name == "file"]
    if len(files) != 1:
        raise InvalidRequestError(f"the body has {len(files)} parts called `file`; it takes one", param="file")
    fields: dict[str, str] = {}
    for part in parts:
        value = part.data.decode(errors="replace").strip()
        if part.name == "file" or (part.name, value) in SAY_NOTHING:
            continue
        if part.name in REFUSED:
            raise InvalidRequestError(f"{part.name} is not supported: {REFUSED[part.name]}", param=part.name)
        if part.name in fields:
            raise InvalidRequestError(f"{part.name} is there twice", param=part.name)
        fields[part.name] = value.lower() if part.name == "stream" else value
    if fields.get("response_format") in ("srt", "vtt"):
        raise InvalidRequestError(f"response_format {fields['response_format']}: {TIMES}", param="response_format")
    fields = bodies.known_fields(TranscriptionBody, fields)
    try:
        return msgspec.convert(fields, TranscriptionBody, strict=False), files[0]
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the form's fields are wrong: {error}") from error
