"""Parts of conversations that aren't text: found, decoded, put into prompts."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.contracts.config import MediaOptions
from tandem.engine.contracts.errors import ConfigError, InvalidRequestError
from tandem.engine.contracts.wire.media import MediaItem
from tandem.router.chat.conversation import ContentForm, as_templates_expect
from tandem.router.chat.template import ChatTemplate
from tandem.router.media import reader
from tandem.router.media.parts import MediaPart, ReadMedia, expanded, media_parts
from tandem.router.media.reader import parse_limits
from tandem.router.text.completion import ModelFacts, with_placeholders

PART = MediaPart("messages[0].content[0]", "audio", "data:,")
PLACEHOLDER = 7


def item(seed: int, length: int) -> MediaItem:
    arrays = {"input_ids": np.full((1, length), PLACEHOLDER), "x": np.array([seed])}
    return MediaItem.of(0, length, "image", arrays)


def test_placeholders_become_spans_and_spans_placeholders():
    media = ReadMedia((item(1, 4), item(2, 6)), "<image>", PLACEHOLDER)
    ids, items = expanded([1, 7, 2, 3, 7], media)
    assert [(each.start, each.length) for each in items] == [(1, 4), (7, 6)]
    assert [token_id if token_id >= 0 else None for token_id in ids] == [1, *[None] * 4, 2, 3, *[None] * 6]
    assert with_placeholders(ids, items) == [1, *[7] * 4, 2, 3, *[7] * 6]
    for wrong in ([1, 7], [7, 7, 7]):
        with pytest.raises(InvalidRequestError, match="<image>"):
            expanded(wrong, media)


CONTENT = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "data:,x"}, "b"]


def test_content_is_told_to_templates_as_they_know_it():
    [message] = as_templates_expect([{"role": "user", "content": CONTENT}], False, ContentForm(False, "<image>"))
    assert message["content"] == "a\n<image>\nb"
    [message] = as_templates_expect([{"role": "user", "content": CONTENT}], False, ContentForm(True, "<image>"))
    assert [part["type"] for part in message["content"]] == ["text", "image", "text"]
    with pytest.raises(InvalidRequestError, match=r"messages\[0\].content\[1\] is of the type 'file'"):
        as_templates_expect([{"role": "user", "content": ["a", {"type": "file"}]}], False, ContentForm(True, ""))


def test_templates_say_whether_they_take_parts():
    parts = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    picky = "{% for m in messages %}{{ m['content'] + 'x' }}{% endfor %}"
    assert [ChatTemplate(source, "test", {}).takes_parts for source in (parts, plain, picky)] == [True, False, False]
    message = {"role": "assistant", "content": [{"type": "text", "text": "so far"}]}
    assert ChatTemplate(parts, "test", {}).render_open([message]) == "so far"


def test_parts_are_found_in_every_form_and_order():
    content = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:1"}},
        {"type": "input_image", "image_url": "data:2"},
        {"type": "input_audio", "input_audio": {"data": "xyz", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "data:4"}},
    ]
    found = media_parts([{"role": "user", "content": "text"}, {"role": "user", "content": content}, {"role": "tool"}])
    assert [part.place for part in found] == [f"messages[1].content[{i}]" for i in (1, 2, 3, 4)]
    assert [part.url for part in found] == ["data:1", "data:2", "data:audio/wav;base64,xyz", "data:4"]
    assert [part.kind for part in found] == ["image", "image", "audio", "audio"]


def test_limits_are_read_in_both_of_vllms_forms():
    assert parse_limits("") == {}
    assert parse_limits('{"image": 4, "audio": 0}') == parse_limits("image=4,audio=0") == {"image": 4, "audio": 0}
    for wrong in ("image", "image=x", "image=-1", '{"video": 1}', "{", "image=1=2"):
        with pytest.raises(ConfigError, match="limit-mm-per-prompt"):
            parse_limits(wrong)


async def test_what_no_message_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled:
        kind, placeholder, placeholder_id = "image", "<image>", PLACEHOLDER

        def item(self, *_: object) -> MediaItem:
            return item(1, 64)

    monkeypatch.setattr(reader, "MAX_TENSOR_BYTES", 1000)
    facts = ModelFacts("m", 100, 100, media_kinds=("image",))
    read = reader.MediaReader(Doubled(), MediaOptions(), 1 << 20).read  # type: ignore[arg-type]
    part = {"type": "image_url", "image_url": {"url": "data:,x"}}
    assert await read([{"role": "user", "content": [part]}], facts) is not None
    with pytest.raises(InvalidRequestError, match=r"content\[1\].*send smaller ones"):
        await read([{"role": "user", "content": [part, part]}], facts)
