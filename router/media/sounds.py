"""Sounds out of bytes that a client sent: one channel, at the rate that the model takes."""

from __future__ import annotations

import io
import wave
from importlib.util import find_spec

import numpy as np

from tandem.router.media.parts import MediaPart
from tandem.router.media.sources import refused
from tandem.router.text.samples import Samples, of_whole_numbers, resampled


def decode_sound(part: MediaPart, data: bytes, rate: int, max_s: float) -> Samples:
    """float32 [num_samples] in [-1, 1], `rate` samples a second. Raises InvalidRequestError that names the part."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE" and _is_pcm(data):
        channels, given_rate = _wave(part, data, max_s)
    elif find_spec("soundfile") is not None:
        channels, given_rate = _soundfile(part, data, max_s)
    else:
        raise refused(part, "only WAV of whole numbers is read here: other formats need tandem-serve[media]")
    if not len(channels):
        raise refused(part, "it holds no samples")
    return resampled(channels.mean(axis=1, dtype=np.float32), given_rate, rate)


def _is_pcm(data: bytes) -> bool:
    at = data.find(b"fmt ", 12)
    return int.from_bytes(data[at + 8 : at + 10], "little") == 1


def _wave(part: MediaPart, data: bytes, max_s: float) -> tuple[Samples, int]:
    """([num_samples, channels], rate)"""
    try:
        with wave.open(io.BytesIO(data)) as opened:
            width, num_channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
            # The header's count may be anything, zero or the largest number where it was not known.
            _check_length(part, min(opened.getnframes(), len(data) // (width * num_channels)), rate, max_s)
            raw = opened.readframes(opened.getnframes())
    except (wave.Error, EOFError, ValueError, ZeroDivisionError) as error:
        raise refused(part, f"it can't be decoded: {error}") from None
    return of_whole_numbers(raw, width, num_channels), rate


def _soundfile(part: MediaPart, data: bytes, max_s: float) -> tuple[Samples, int]:
    import soundfile

    try:
        with soundfile.SoundFile(io.BytesIO(data)) as opened:
            _check_length(part, opened.frames, opened.samplerate, max_s)
            most = int(max_s * opened.samplerate) + 1  # a header may say less than there is
            samples: Samples = opened.read(most, dtype="float32", always_2d=True)
            _check_length(part, len(samples), opened.samplerate, max_s)
            return np.nan_to_num(samples), opened.samplerate
    except (RuntimeError, ValueError, OSError) as error:  # soundfile's own is a RuntimeError
        raise refused(part, f"it can't be decoded: {error}") from None


def _check_length(part: MediaPart, num_samples: int, rate: int, max_s: float) -> None:
    if rate <= 0 or num_samples > max_s * rate:
        raise refused(part, f"it is longer than {max_s:g} s (--media-max-audio-s)")
