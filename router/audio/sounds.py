"""From the bytes of a sound file to samples. Waves are read by Python itself; other formats by `soundfile` where it is
installed."""

from __future__ import annotations

import io
import wave

import numpy as np

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.text.samples import Samples, of_whole_numbers, resampled

MAX_RATE = 384_000  # samples a second; more is no sound


def decode_sound(data: bytes, rate: int, max_seconds: float) -> Samples:
    """Mono samples in [-1, 1], float32 [N], `rate` a second, of a file of at most `max_seconds`. Takes long for long
    files: off the event loop. Raises InvalidRequestError for what is no sound, and for more of it."""
    try:
        found, own_rate = _wave(data, max_seconds) if data[:4] == b"RIFF" else _by_soundfile(data, max_seconds)
    except InvalidRequestError:
        raise
    except Exception as error:  # whatever a decoder raises, the bytes are at fault
        raise InvalidRequestError(f"the file can't be read as sound: {error}", param="file") from error
    if not len(found):
        raise InvalidRequestError("the file holds no sound", param="file")
    if not np.isfinite(found).all():
        raise InvalidRequestError("the file's samples are no numbers", param="file")
    return resampled(found, own_rate, rate)


def _wave(data: bytes, max_seconds: float) -> tuple[Samples, int]:
    try:
        with wave.open(io.BytesIO(data)) as reader:
            width, channels, rate = reader.getsampwidth(), reader.getnchannels(), reader.getframerate()
            _check_length(reader.getnframes(), rate, max_seconds)
            raw = reader.readframes(reader.getnframes())
    except wave.Error:  # a format that is not PCM
        return _by_soundfile(data, max_seconds)
    return of_whole_numbers(raw, width, channels).mean(axis=1), rate


def _by_soundfile(data: bytes, max_seconds: float) -> tuple[Samples, int]:
    try:
        import soundfile
    except (ImportError, OSError):
        raise InvalidRequestError(
            "the file is no PCM wave: send one, or have the server's operator install soundfile", param="file"
        ) from None
    with soundfile.SoundFile(io.BytesIO(data)) as file:
        _check_length(file.frames, file.samplerate, max_seconds)
        values: Samples = file.read(dtype="float32", always_2d=True)
        return values.mean(axis=1), file.samplerate


def _check_length(num_frames: int, rate: int, max_seconds: float) -> None:
    if not 0 < rate <= MAX_RATE:
        raise InvalidRequestError(f"the file has {rate} samples a second", param="file")
    if num_frames > max_seconds * rate:
        raise InvalidRequestError(
            f"the sound takes {num_frames / rate:.0f} s; at most {max_seconds:.0f} s are taken at once", param="file"
        )
