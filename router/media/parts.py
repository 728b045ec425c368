"""The parts of messages that aren't text: which there are, and what bytes they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.wire.media import MediaItem, digest_ids

MediaType = Literal["image", "audio"]
# A part's `type`, in chat's words, vLLM's and those of /v1/responses -> what it holds.
MEDIA_PARTS: dict[str, MediaType] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio": "audio",
}


class PlacedPart(dict[str, Any]):
    """A part that the client did not send in a chat message: errors name the `place` where it did."""

    def __init__(self, part: Mapping[str, Any], place: str) -> None:
        super().__init__(part)
        self.place = place


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One part, by the URL that names its bytes: `data:…` or `http…`. `place` is what a client calls it."""

    place: str
    kind: MediaType
    url: str


@dataclass(frozen=True, slots=True)
class ReadMedia:
    """The parts of a conversation, in its order, as a model takes them; each begins at token 0. `placeholder` is the
    token that stands for each in the conversation's text, `placeholder_id` its id."""

    items: tuple[MediaItem, ...]
    placeholder: str
    placeholder_id: int


def media_parts(messages: Sequence[Mapping[str, Any]]) -> list[MediaPart]:
    """All such parts, in order. Raises InvalidRequestError that names one which is malformed."""
    return [part for i, message in enumerate(messages) for part in _parts_of(message.get("content"), f"messages[{i}]")]


def named_parts(data: Mapping[MediaType, str | list[str]]) -> list[PlacedPart]:
    """Parts of the images and sounds that a completion's body names by their URLs."""
    return [
        PlacedPart({"type": kind, kind: url}, f"multi_modal_data.{kind}[{i}]")
        for kind, urls in data.items()
        for i, url in enumerate([urls] if isinstance(urls, str) else urls)
    ]


def kind_of(part: Any) -> MediaType | None:
    """What a part of a message's content holds; None: text, or nothing known."""
    kind = part.get("type") if isinstance(part, dict) else None
    return MEDIA_PARTS.get(kind) if isinstance(kind, str) else None


def _parts_of(content: Any, message: str) -> Iterator[MediaPart]:
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = kind_of(part)
        if kind is not None:
            place = part.place if isinstance(part, PlacedPart) else f"{message}.content[{i}]"
            yield MediaPart(place, kind, _url_of(part, place))


def _url_of(part: Mapping[str, Any], place: str) -> str:
    """The URL that a part names, in any of its forms: text, {url: …}, or base64 with a format."""
    name = part["type"]
    value = part.get("image_url" if name == "input_image" else name)
    if isinstance(value, dict):
        if isinstance(value.get("data"), str):
            return f"data:audio/{str(value.get('format', 'wav'))[:16]};base64,{value['data']}"
        value = value.get("url")
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(
            f"{place}.{name} must be a URL (a data: URL holds the bytes themselves), or {{'data': base64, 'format': "
            "'wav'} for sound",
            param="messages",
        )
    return value


def expanded(token_ids: list[int], media: ReadMedia) -> tuple[list[int], tuple[MediaItem, ...]]:
    """(the prompt's ids with a span in the place of each placeholder, its items with their places). Raises
    InvalidRequestError when there are not as many placeholders as items."""
    places = [at for at, token_id in enumerate(token_ids) if token_id == media.placeholder_id]
    if len(places) != len(media.items):
        raise InvalidRequestError(
            f"the text has {len(places)} times {media.placeholder}, which stands for one of its {len(media.items)} "
            "images or sounds: a prompt has it once for each; of a conversation, leave it out of the text",
            param="messages",
        )
    found: list[int] = []
    items, done = [], 0
    for at, item in zip(places, media.items, strict=True):
        found += token_ids[done:at]
        items.append(msgspec.structs.replace(item, start=len(found)))
        found += digest_ids(item.digest, item.length).tolist()
        done = at + 1
    return found + token_ids[done:], tuple(items)
