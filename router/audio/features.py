"""What Whisper's encoder hears: windows of sound as log-mel spectrograms. They are those of transformers'
WhisperFeatureExtractor, made without loading torch."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.router.text.samples import Samples

QUIET_S, LOOK_BACK_S = 0.1, 3.0  # a window ends in the quietest such moment of its last seconds; guesses
FLOOR, RANGE = 1e-10, 8.0  # of the spectrogram, and decades below its peak that are kept: Whisper's own


class FeatureExtractor(msgspec.Struct, frozen=True, dict=True):
    """The fields of preprocessor_config.json that count."""

    feature_size: int = 80
    sampling_rate: int = 16_000
    hop_length: int = 160
    n_fft: int = 400
    chunk_length: int = 30  # seconds of a window

    @classmethod
    def of_folder(cls, folder: Path) -> FeatureExtractor:
        """The features that a model's folder describes. Raises ConfigError when it has none."""
        path = folder / "preprocessor_config.json"
        raw = read_json_object(path)
        if raw is None:
            raise ConfigError(f"{path} is missing: nothing says what the model hears; fetch the model again")
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{path}: {error}; repair the file") from error

    def windows(self, samples: Samples) -> list[Samples]:
        """The sound cut into windows, each where it is quiet towards the end of the longest that the encoder takes."""
        longest = self.chunk_length * self.sampling_rate
        moment = max(1, int(QUIET_S * self.sampling_rate))
        found = []
        while len(samples) > longest:
            first = max(1, longest - min(longest // 2, int(LOOK_BACK_S * self.sampling_rate)))
            tail = samples[first : longest - (longest - first) % moment].reshape(-1, moment)
            end = first + moment * int((tail**2).sum(axis=1).argmin()) + moment // 2
            found.append(samples[:end])
            samples = samples[end:]
        return [*found, samples]

    def features(self, window: Samples) -> npt.NDArray[np.float32]:
        """float32 [1, mel bins, frames] of a window, with silence behind it."""
        length = self.chunk_length * self.sampling_rate
        padded = np.zeros(length, np.float64)
        padded[: len(window)] = window[:length]
        around = np.pad(padded, self.n_fft // 2, mode="reflect")
        frames = np.lib.stride_tricks.sliding_window_view(around, self.n_fft)[:: self.hop_length]
        frames = frames[: length // self.hop_length]
        power = np.abs(np.fft.rfft(frames * np.hanning(self.n_fft + 1)[:-1])) ** 2
        mel = np.log10(np.maximum(FLOOR, power @ self.filters)).T
        mel = (np.maximum(mel, mel.max() - RANGE) + 4.0) / 4.0
        return mel.astype(np.float32)[None]

    @cached_property
    def filters(self) -> npt.NDArray[np.float64]:
        """Triangles of equal area, evenly apart on Slaney's mel scale: [frequencies, mel bins]."""
        top = self.sampling_rate / 2
        edges = _hertz(np.linspace(0.0, _mel(top), self.feature_size + 2))
        frequencies = np.linspace(0.0, top, self.n_fft // 2 + 1)
        slopes = edges[None, :] - frequencies[:, None]
        down, up = -slopes[:, :-2] / np.diff(edges)[:-1], slopes[:, 2:] / np.diff(edges)[1:]
        triangles: npt.NDArray[np.float64] = np.maximum(0.0, np.minimum(down, up))
        return triangles * (2.0 / (edges[2:] - edges[:-2]))


_LINEAR_TOP, _LINEAR_STEP, _LOG_STEP = 1000.0, 200.0 / 3, np.log(6.4) / 27  # Slaney's mel scale


def _mel(hertz: float) -> float:
    if hertz < _LINEAR_TOP:
        return hertz / _LINEAR_STEP
    return float(_LINEAR_TOP / _LINEAR_STEP + np.log(hertz / _LINEAR_TOP) / _LOG_STEP)


def _hertz(mels: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    corner = _LINEAR_TOP / _LINEAR_STEP
    return np.where(mels < corner, mels * _LINEAR_STEP, _LINEAR_TOP * np.exp(_LOG_STEP * (mels - corner)))
