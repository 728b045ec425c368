"""From sound files to samples."""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec

import numpy as np
import pytest

from tandem.router.text.samples import BadSoundError, decoded, resampled


def wave_file(samples: np.ndarray, rate: int = 16_000, width: int = 2, channels: int = 1) -> bytes:
    """A PCM wave of samples in [-1, 1]: [num_samples], the same in all channels, or [num_samples, channels]."""
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    scaled = np.repeat(whole, channels) if whole.ndim == 1 else whole.reshape(-1)
    if width == 1:
        raw = (scaled + 128).astype(np.uint8).tobytes()
    else:
        raw = scaled.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(width)
        writer.setframerate(rate)
        writer.writeframes(raw)
    return file.getvalue()


def tone(rate: int, seconds: float = 0.5) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)


@pytest.mark.parametrize(("width", "channels", "rate"), [(1, 1, 16_000), (2, 2, 16_000), (3, 1, 44_100), (4, 2, 8_000)])
def test_waves_of_every_width_and_rate_sound_alike(width: int, channels: int, rate: int) -> None:
    found = decoded(wave_file(tone(rate), rate, width, channels), 16_000, 10.0)
    inner = slice(800, -800)  # a spectrum rings at the ends
    assert found.dtype == np.float32
    assert np.abs(found - tone(16_000))[inner].max() < 0.02


def test_channels_are_mixed() -> None:
    left, right = tone(8000), 0.5 * tone(8000)[::-1]
    found = decoded(wave_file(np.stack([left, right], axis=1), 8000, channels=2), 8000, 1.0)
    np.testing.assert_allclose(found, (left + right) / 2, atol=1e-3)


@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 48_000])
def test_resampling_keeps_a_tone(rate: int) -> None:
    np.testing.assert_allclose(resampled(tone(rate), rate, 16_000), tone(16_000), atol=0.01)


WAVE = wave_file(tone(8000, 0.1), 8000)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "decoded|other formats"),
        (b"not a sound", "decoded|other formats"),
        (b"ID3" + bytes(200), "decoded|other formats"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "decoded|other formats"),
        (WAVE[:20], "decoded|other formats"),
        (WAVE[:8] + b"AIFF" + WAVE[12:], "decoded|other formats"),
        (WAVE[:22] + bytes(2) + WAVE[24:], "decoded"),  # no channels
        (WAVE[:24] + bytes(4) + WAVE[28:], "decoded|0 samples a second"),
        (WAVE[:44], "no samples"),
        (wave_file(np.zeros(8000 * 3), 8000), "longer than 2 s"),
    ],
)
def test_what_is_no_sound_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadSoundError, match=why):
        decoded(data, 16_000, 2.0)


def test_a_wave_file_cut_short_is_as_long_as_what_came() -> None:
    assert len(decoded(WAVE[:-101], 8000, 1.0)) == 800 - 51


@pytest.mark.skipif(find_spec("soundfile") is None, reason="without soundfile only WAV is read")
def test_other_formats_are_read_by_soundfile() -> None:
    import soundfile

    for form in ("FLAC", "OGG", "WAV"):
        options = {"subtype": "FLOAT"} if form == "WAV" else {}
        soundfile.write(out := io.BytesIO(), tone(8000, 0.1), 8000, format=form, **options)
        assert abs(len(decoded(out.getvalue(), 16_000, 1.0)) - 1600) < 40
        with pytest.raises(BadSoundError, match="longer"):
            decoded(out.getvalue(), 16_000, 0.05)
    soundfile.write(out := io.BytesIO(), np.full(800, np.nan), 8000, format="WAV", subtype="FLOAT")
    with pytest.raises(BadSoundError, match="no numbers"):
        decoded(out.getvalue(), 16_000, 1.0)
