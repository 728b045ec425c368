"""Parts of conversations that aren't text: found, decoded, put into prompts."""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec

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
from tandem.router.media.sounds import decode_sound
from tandem.router.text.completion import ModelFacts, with_placeholders
from tandem.router.text.samples import resampled

PART = MediaPart("messages[0].content[0]", "audio", "data:,")
PLACEHOLDER = 7


def wav_of(samples: np.ndarray, rate: int = 8000) -> bytes:
    """int16 [num_samples, channels]"""
    with wave.open(out := io.BytesIO(), "wb") as file:
        file.setnchannels(samples.shape[1])
        file.setsampwidth(samples.dtype.itemsize)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def tone(hertz: float, rate: int, seconds: float = 0.1) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_sounds_of_every_width_are_the_mean_of_their_channels(width: int) -> None:
    left, right = tone(440, 8000), tone(1000, 8000)
    both = np.stack([left, right], axis=1) * 0.9
    kinds = {1: ("u1", 127, 128), 2: ("<i2", 32767, 0), 4: ("<i4", 2**31 - 200, 0)}
    kind, scale, zero = kinds[width]
    found = decode_sound(PART, wav_of((both * scale + zero).astype(kind)), 8000, 1.0)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, both.mean(axis=1), atol=0.02 if width == 1 else 1e-3)


def test_resampling_keeps_a_tone():
    for rate in (8000, 16000, 44100, 48000):
        np.testing.assert_allclose(resampled(tone(400, rate), rate, 16000), tone(400, 16000), atol=0.01)


WAV = wav_of((tone(440, 8000)[:, None] * 9999).astype("<i2"))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "decoded|formats"),
        (WAV[:20], "decoded|formats"),
        (WAV[:44], "no samples"),
        (WAV[:8] + b"AIFF" + WAV[12:], "decoded|formats"),
        (WAV[:24] + bytes(4) + WAV[28:], "longer|decoded"),  # no samples a second
        (WAV[:22] + bytes(2) + WAV[24:], "decoded"),  # no channels
        (b"ID3" + bytes(200), "decoded|formats"),
        (wav_of(np.zeros((20_000, 1), "<i2"), 8000), "longer than 1 s"),
    ],
)
def test_what_is_no_sound_is_refused_by_its_place(data: bytes, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why) as caught:
        decode_sound(PART, data, 16000, 1.0)
    assert "messages[0].content[0]" in caught.value.message


def test_a_wave_file_cut_short_is_as_long_as_what_came():
    assert len(decode_sound(PART, WAV[:-101], 8000, 1.0)) == 800 - 51


@pytest.mark.skipif(find_spec("soundfile") is None, reason="without soundfile only WAV is read")
def test_other_formats_are_read_by_soundfile():
    import soundfile

    for form in ("FLAC", "OGG", "WAV"):
        options = {"subtype": "FLOAT"} if form == "WAV" else {}
        soundfile.write(out := io.BytesIO(), tone(440, 8000), 8000, format=form, **options)
        assert abs(len(decode_sound(PART, out.getvalue(), 16000, 1.0)) - 1600) < 40
        with pytest.raises(InvalidRequestError, match="longer"):
            decode_sound(PART, out.getvalue(), 16000, 0.05)


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
