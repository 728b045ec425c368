"""From the bytes of a sound file to samples. Waves are read by Python itself, other formats by `soundfile` where it is
installed."""

from __future__ import annotations

import io
import wave

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]

MAX_RATE = 384_000  # samples a second; more is no sound


class BadSoundError(ValueError):
    """Bytes can't be taken as a sound; the message says why of "it"."""


def decoded(data: bytes, rate: int, max_s: float) -> Samples:
    """One channel in [-1, 1], float32 [num_samples], `rate` samples a second; takes long for long sounds.

    Raises BadSoundError for what is no sound, and for one that lasts longer than `max_s` seconds."""
    is_pcm_wave = data[:4] == b"RIFF" and data[8:12] == b"WAVE" and data[data.find(b"fmt ", 12) + 8 :][:2] == b"\x01\0"
    try:
        frames, own_rate = (_by_wave if is_pcm_wave else _by_soundfile)(data, max_s)
    except BadSoundError:
        raise
    except Exception as error:  # whatever a decoder raises, the bytes are at fault
        raise BadSoundError(f"it can't be decoded: {error}") from error
    if not len(frames):
        raise BadSoundError("it holds no samples")
    if not np.isfinite(frames).all():
        raise BadSoundError("its samples are no numbers")
    return resampled(frames.mean(axis=1, dtype=np.float32), own_rate, rate)


def _by_wave(data: bytes, max_s: float) -> tuple[Samples, int]:
    """Decodes a WAV: samples [num_samples, num_channels], and how many a second."""
    with wave.open(io.BytesIO(data)) as opened:
        width, num_channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
        # The header's count may be anything, zero or the largest number where it was not known.
        _check(min(opened.getnframes(), len(data) // (width * num_channels)), rate, max_s)
        return of_whole_numbers(opened.readframes(opened.getnframes()), width, num_channels), rate


def _by_soundfile(data: bytes, max_s: float) -> tuple[Samples, int]:
    """Decodes what the library knows: samples [num_samples, num_channels], and how many a second."""
    try:
        import soundfile
    except (ImportError, OSError):
        raise BadSoundError("it is no WAV of whole numbers: other formats need tandem-serve[media] here") from None
    with soundfile.SoundFile(io.BytesIO(data)) as opened:
        _check(opened.frames, opened.samplerate, max_s)
        most = int(max_s * opened.samplerate) + 1  # a header may say less than there is
        frames: Samples = opened.read(most, dtype="float32", always_2d=True)
        _check(len(frames), opened.samplerate, max_s)
        return frames, opened.samplerate


def _check(num_samples: int, rate: int, max_s: float) -> None:
    if not 0 < rate <= MAX_RATE:
        raise BadSoundError(f"it has {rate} samples a second")
    if num_samples > max_s * rate:
        raise BadSoundError(f"it is longer than {max_s:g} s")


def of_whole_numbers(raw: bytes, width: int, num_channels: int) -> Samples:
    """float32 [num_samples, num_channels] in [-1, 1], of the frames of a PCM wave with `width` bytes a number. A last
    frame that is not whole is left out."""
    raw = raw[: len(raw) // (width * num_channels) * width * num_channels]
    if width == 1:
        samples = (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    elif width == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        samples = wide.view("<i4")[:, 0].astype(np.float32) / (1 << 31)
    else:
        samples = np.frombuffer(raw, f"<i{width}").astype(np.float32) / (1 << (8 * width - 1))
    found: Samples = samples.astype(np.float32).reshape(-1, num_channels)
    return found


def resampled(samples: Samples, given_rate: int, rate: int) -> Samples:
    """The same sound at another rate, its spectrum cut off or filled up with zeros (as scipy.signal.resample does)."""
    if given_rate == rate:
        return samples
    length = max(1, round(len(samples) * rate / given_rate))
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(samples))).astype(np.float32)
