"""Samples of sounds, whoever sent them: out of whole numbers, at another rate. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]


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
