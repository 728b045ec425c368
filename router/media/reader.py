"""From a conversation's parts to items of its prompt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.engine.contracts.config import MediaOptions
from tandem.engine.contracts.errors import ConfigError, InvalidRequestError
from tandem.engine.contracts.wire.media import MediaItem
from tandem.router.media.parts import MediaPart, ReadMedia, media_parts
from tandem.router.media.processor import MediaProcessor
from tandem.router.media.sources import MediaSources, refused
from tandem.router.text.completion import ModelFacts

MAX_THREADS = 2  # that decode at a time: each may need some hundred megabytes; a guess
MAX_TENSOR_BYTES = 192 << 20  # of one prompt; nodes close connections whose messages are beyond 256 MiB
DEFAULT_LIMIT = 16  # items of each kind in one prompt; a guess


class MediaReader:
    """Reads the parts of conversations; one per router process. `processor` None: the model takes text alone. Raises
    ConfigError for limits that are none."""

    def __init__(self, processor: MediaProcessor | None, options: MediaOptions, max_bytes: int) -> None:
        self._processor, self._options = processor, options
        self._limits = parse_limits(options.limit_mm_per_prompt)
        self._sources = MediaSources(options.allowed_media_domains, max_bytes, options.media_fetch_s)
        self._slots = asyncio.Semaphore(MAX_THREADS)

    async def read(self, messages: Sequence[Mapping[str, Any]], facts: ModelFacts) -> ReadMedia | None:
        """What the conversation has beside text. None: nothing, or the model takes text alone.

        Raises InvalidRequestError that names the part."""
        if self._processor is None or not (parts := media_parts(messages)):
            return None
        self._check(parts, facts)
        items: list[MediaItem] = []
        num_bytes = 0
        for part in parts:
            data = await self._sources.bytes_of(part)
            async with self._slots:
                items.append(await asyncio.to_thread(self._item, part, data))
            num_bytes += sum(len(tensor.data) for tensor in items[-1].tensors)
            if num_bytes > MAX_TENSOR_BYTES:
                raise refused(
                    part,
                    f"with it the conversation's images and sounds are {num_bytes} bytes as the model "
                    f"takes them; at most {MAX_TENSOR_BYTES} are: send smaller ones",
                )
        return ReadMedia(tuple(items), self._processor.placeholder, self._processor.placeholder_id)

    def _item(self, part: MediaPart, data: bytes) -> MediaItem:
        assert self._processor is not None
        return self._processor.item(part, data, self._options.media_max_pixels, self._options.media_max_audio_s)

    def _check(self, parts: list[MediaPart], facts: ModelFacts) -> None:
        for part in parts:
            if part.kind not in facts.media_kinds:
                takes = " and ".join(("text", *facts.media_kinds)) if facts.media_kinds else "text alone"
                raise refused(part, f"this model takes {takes}")
        for kind, count in Counter(part.kind for part in parts).items():
            most = self._limits.get(kind, DEFAULT_LIMIT)
            if count > most:
                raise InvalidRequestError(
                    f"the conversation holds {count} parts of {kind}; at most {most} are taken (--limit-mm-per-prompt)",
                    param="messages",
                )


def parse_limits(given: str) -> dict[str, int]:
    """Limits of each kind from `{"image": 2}`, or `image=2,audio=1` as vLLM once had it. Raises ConfigError."""
    try:
        if given.lstrip().startswith("{"):
            limits = msgspec.json.decode(given, type=dict[str, int])
        else:
            limits = {name: int(count) for name, count in (each.split("=") for each in given.split(",") if each)}
    except (ValueError, msgspec.DecodeError):
        limits = {given: -1}
    if set(limits) - {"image", "audio"} or any(count < 0 for count in limits.values()):
        raise ConfigError(f'--limit-mm-per-prompt {given!r} must be like {{"image": 4, "audio": 1}}')
    return limits
