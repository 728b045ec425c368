"""From an upload to what an encoder hears."""

from __future__ import annotations

import numpy as np
import pytest

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.audio.body import read_fields
from tandem.router.audio.features import FeatureExtractor
from tandem.router.audio.multipart import parse_form
from tandem.router.text.body_reader import BodyReader


def form(*parts: tuple[str, bytes, str]) -> bytes:
    """Parts of (name, data, filename or "")."""
    body = b""
    for name, data, filename in parts:
        more = f'; filename="{filename}"' if filename else ""
        body += f'--xyz\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + data + b"\r\n"
    return body + b"--xyz--\r\n"


@pytest.mark.parametrize("options", [{}, {"feature_size": 128}, {"feature_size": 16, "chunk_length": 1}])
def test_an_encoder_hears_what_transformers_would_tell_it(options: dict) -> None:
    from transformers import WhisperFeatureExtractor

    seconds = options.get("chunk_length", 30)
    noise = np.random.default_rng(1).standard_normal(int(16_000 * seconds * 0.7)).astype(np.float32) * 0.1
    expected = WhisperFeatureExtractor(**options)(noise, sampling_rate=16_000, return_tensors="np")["input_features"]
    assert np.abs(FeatureExtractor(**options).features(noise) - expected).max() < 1e-4


def test_long_sounds_are_cut_where_they_are_quiet() -> None:
    extractor = FeatureExtractor(chunk_length=1)
    samples = np.random.default_rng(2).standard_normal(16_000 * 3).astype(np.float32)
    samples[12_000:14_000] = 0.0
    windows = extractor.windows(samples)
    assert np.array_equal(np.concatenate(windows), samples)
    assert all(0 < len(window) <= 16_000 for window in windows)
    assert 12_000 <= len(windows[0]) <= 14_000


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "boundary"),
        (b"{}", "boundary"),
        (form(("file", b"x", "a.wav"))[:-12], "middle"),
        (form(), "boundary|middle"),
        (b"--xyz\r\nX: y\r\n\r\ndata\r\n--xyz--", "has no name"),
        (form(*[("a", b"", "")] * 80), "more than 64 parts"),
        (form(("model", b"m", "")), "0 parts called `file`"),
        (form(("file", b"x", "a.wav"), ("file", b"y", "b.wav")), "2 parts called `file`"),
        (form(("file", b"x", "a"), ("response_format", b"srt", "")), "response_format srt"),
        (form(("file", b"x", "a"), ("temperature", b"hot", "")), "temperature"),
        (form(("file", b"x", "a"), ("langage", b"de", "")), "did you mean language"),
        (form(("file", b"x", "a"), ("extra_body", b"red", "")), "extra_body is not supported"),
        (form(("file", b"x", "a"), ("timestamp_granularities[]", b"word", "")), "timestamp_granularities"),
    ],
)
def test_a_form_that_is_wrong_says_where(body: bytes, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        read_fields(BodyReader(), parse_form(body))


def test_a_forms_fields_are_read() -> None:
    data = b"\r\n--xy\r\n\x00binary--xyz"
    body = form(("file", data, "a.wav"), ("temperature", b"0.5", ""), ("stream", b"True", ""), ("language", b"de", ""))
    fields, file = read_fields(BodyReader(), parse_form(body))
    assert (fields.temperature, fields.stream, fields.language, file) == (0.5, True, "de", data)


def test_fields_that_change_nothing_are_left_out_of_forms_too() -> None:
    body = form(("file", b"x", "a"), ("colour", b"red", ""), ("tools", b"null", ""))
    assert read_fields(BodyReader(), parse_form(body))[0].temperature == 0
    with pytest.raises(InvalidRequestError, match="colour"):
        read_fields(BodyReader(is_strict=True), parse_form(body))
