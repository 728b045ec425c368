"""Readers of forms that ask for a transcript or a translation of a sound: each window of it is one prompt."""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.wire.encoder import encoder_input
from tandem.engine.contracts.wire.media import MediaItem
from tandem.router.access.api_keys import Tenant
from tandem.router.audio.body import TranscriptionBody, read_fields
from tandem.router.audio.features import FeatureExtractor
from tandem.router.audio.format import Heard, TranscriptFormat
from tandem.router.audio.multipart import parse_form
from tandem.router.audio.whisper import Task, WhisperTokens
from tandem.router.http.asked import Asked, AskReader
from tandem.router.http.listeners import Collector
from tandem.router.requests.service import CompletionService
from tandem.router.text.completion import ModelFacts, check_model, check_task
from tandem.router.text.samples import BadSoundError, decoded

TRANSCRIPTS: dict[str, Task] = {"/v1/audio/transcriptions": "transcribe", "/v1/audio/translations": "translate"}
MAX_SECONDS = 30 * 60.0  # of one sound: some 60 MB of what encoders hear; a guess
LIKELY = 1e4  # added to the logits of languages, when the model is asked which it hears; a guess: above all others


def transcription_reader(service: CompletionService, task: Task) -> AskReader:
    turn = asyncio.Semaphore(1)  # files are decoded one at a time, off the event loop

    async def read(raw: bytes, tenant: Tenant) -> Asked:
        parts = await asyncio.to_thread(parse_form, raw)
        body, file = read_fields(service.bodies, parts)
        facts = await _facts(service, body)
        tokens, extractor = _tokens_of(service.tokenizer.folder), _extractor_of(service.tokenizer.folder)
        async with turn:
            items, seconds = await asyncio.to_thread(_heard, file, extractor, facts)
        before = service.tokenizer.encode(body.prompt, add_special_tokens=False) if body.prompt.strip() else []
        language = None
        if tokens.lang_to_id:
            named = None if body.language is None else tokens.language_id(body.language)
            language = named if named is not None else await _spoken(service, items[0], facts, tokens, tenant)
        elif body.language not in (None, "en"):
            tokens.language_id(str(body.language))
        assert facts.encoder is not None
        room = facts.encoder.max_decoder_len // 2 - 1
        begin = tokens.begin(facts.encoder.prompt, language, task, before[-room:])
        asked = body.as_completion()
        plans = [service.plan_sound(asked, item, begin, tenant) for item in items]
        heard = Heard(task, tokens.language_of(language or -1) or "en", seconds, body.temperature)
        form = TranscriptFormat(heard, body.response_format)
        return Asked(f"transcript-{uuid.uuid4().hex}", asked, plans, form, content_type=form.content_type)

    return read


async def _facts(service: CompletionService, body: TranscriptionBody) -> ModelFacts:
    facts = await service.awaited_facts()
    check_model(body.model, facts)
    check_task(facts, "generate")
    if facts.encoder is None or facts.encoder.kind != "audio":
        raise InvalidRequestError(f"{facts.name} hears nothing: it takes text; ask /v1/completions", param="model")
    return facts


def _heard(file: bytes, extractor: FeatureExtractor, facts: ModelFacts) -> tuple[list[MediaItem], tuple[float, ...]]:
    """(the encoder's inputs, seconds of each). Raises InvalidRequestError."""
    assert facts.encoder is not None
    try:
        samples = decoded(file, extractor.sampling_rate, MAX_SECONDS)
    except BadSoundError as error:
        raise InvalidRequestError(f"the sound can't be taken: {error}", param="file") from error
    windows = extractor.windows(samples)
    items = [
        encoder_input(facts.encoder.max_positions, {"input_features": extractor.features(window)}) for window in windows
    ]
    return items, tuple(len(window) / extractor.sampling_rate for window in windows)


async def _spoken(
    service: CompletionService, item: MediaItem, facts: ModelFacts, tokens: WhisperTokens, tenant: Tenant
) -> int:
    """The token of the language that the model hears: the one that it would begin with. What the encoder made of the
    window is in the prefix cache for the transcript itself."""
    assert facts.encoder is not None
    body = TranscriptionBody(max_completion_tokens=1).as_completion()
    plan = service.plan_sound(body, item, facts.encoder.prompt, tenant)
    bias = tuple((token_id, LIKELY) for token_id in tokens.lang_to_id.values())
    plan = replace(plan, sampling=msgspec.structs.replace(plan.sampling, logit_bias=bias, banned_first_ids=()))
    answer = TranscriptFormat(Heard("transcribe", "", (0.0,), 0.0), "verbose_json")
    name = f"language-{uuid.uuid4().hex}"
    collector = Collector(Asked(name, body, [plan], answer), service.tokenizer)
    generations = service.start(name, body, [plan], collector)
    collector.follow(generations)
    try:
        found = msgspec.json.decode(await collector.done)
    finally:
        service.abort(generations, InvalidRequestError("its client has left"))
        generations.clear()
    return int(found["segments"][0]["tokens"][0])


@cache
def _tokens_of(folder: Path) -> WhisperTokens:
    return WhisperTokens.of_folder(folder)


@cache
def _extractor_of(folder: Path) -> FeatureExtractor:
    return FeatureExtractor.of_folder(folder)
