"""What a model takes of an image or a sound: its own processor's tensors, and how many tokens stand for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.engine.contracts.wire.media import MIN_SPAN, MediaItem
from tandem.router.media.images import decode_image
from tandem.router.media.parts import MediaPart, MediaType
from tandem.router.media.sources import refused
from tandem.router.text.samples import BadSoundError, decoded
from tandem.router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
Arrays = dict[str, np.ndarray]
Fields = dict[str, Any]


class Family(NamedTuple):
    """An architecture: what it takes, which fields of config.json may name its placeholder, how many tokens a processed
    item has."""

    kind: MediaType
    placeholder_fields: tuple[str, ...]
    num_tokens: Callable[[Fields, Arrays], int]


def _llava(config: Fields, arrays: Arrays) -> int:
    patch = config["vision_config"].get("patch_size", 14)
    height, width = arrays["pixel_values"].shape[-2:]
    return (height // patch) * (width // patch) + (config.get("vision_feature_select_strategy") == "full")


def _qwen_vl(config: Fields, arrays: Arrays) -> int:
    merge = config["vision_config"].get("spatial_merge_size", 2)
    return int(arrays["image_grid_thw"].prod()) // merge**2


def _qwen2_audio(config: Fields, arrays: Arrays) -> int:
    heard = int(arrays["feature_attention_mask"].sum())
    return max(0, ((heard - 1) // 2 + 1 - 2) // 2 + 1)


# The same architectures as engine/models/hf/towers.py.
FAMILIES = {
    "llava": Family("image", ("image_token_id", "image_token_index"), _llava),
    "qwen2_vl": Family("image", ("image_token_id",), _qwen_vl),
    "qwen2_5_vl": Family("image", ("image_token_id",), _qwen_vl),
    "qwen2_audio": Family("audio", ("audio_token_id", "audio_token_index"), _qwen2_audio),
}


class MediaProcessor:
    """The processor of one model folder. It is loaded when it is first needed, and torch with it."""

    def __init__(self, folder: Path, config: Fields, family: Family, tokenizer: Tokenizer) -> None:
        self._folder, self._config, self._family = folder, config, family
        self.kind = family.kind
        self.placeholder_id = next(
            config[name] for name in family.placeholder_fields if isinstance(config.get(name), int)
        )
        self.placeholder = tokenizer.token_string(self.placeholder_id)
        self._lock = threading.Lock()
        self._own: Any = None

    @classmethod
    def of(cls, folder: Path, tokenizer: Tokenizer) -> MediaProcessor | None:
        """The processor of a model's folder. None: the model takes text alone."""
        config = read_json_object(folder / "config.json") or {}
        family = FAMILIES.get(str(config.get("model_type")))
        if family is None or not any(isinstance(config.get(name), int) for name in family.placeholder_fields):
            return None
        return cls(folder, config, family, tokenizer)

    def item(self, part: MediaPart, data: bytes, max_pixels: int, max_audio_s: float) -> MediaItem:
        """What the model takes of a part, as an item that begins at token 0; takes long.

        Raises InvalidRequestError that names the part."""
        own = self._loaded(part)
        try:
            if part.kind == "image":
                arrays = dict(own(images=[decode_image(part, data, max_pixels)], return_tensors="np"))
            else:
                sound = decoded(data, own.sampling_rate, max_audio_s)
                # The processor takes only the beginning of a sound that is longer than the model hears at once.
                asked = {"padding": "max_length", "return_attention_mask": True, "return_tensors": "np"}
                arrays = dict(own([sound], sampling_rate=own.sampling_rate, **asked))
                arrays["feature_attention_mask"] = arrays.pop("attention_mask")
        except InvalidRequestError:
            raise
        except BadSoundError as error:
            raise refused(part, str(error)) from None
        except Exception as error:  # whatever a processor says to an image that it can't cut into patches
            raise refused(part, f"the model's processor can't take it: {error}") from None
        arrays = {name: _as_sent(np.asarray(array)) for name, array in arrays.items()}
        num_tokens = self._family.num_tokens(self._config, arrays)
        if num_tokens < MIN_SPAN:
            raise refused(part, f"it is too small: {num_tokens} tokens would stand for it, {MIN_SPAN} must")
        arrays["input_ids"] = np.full((1, num_tokens), self.placeholder_id)
        if "image_grid_thw" in arrays:
            arrays["mm_token_type_ids"] = np.ones((1, num_tokens), np.int64)
        return MediaItem.of(0, num_tokens, self.kind, arrays)

    def _loaded(self, part: MediaPart) -> Any:
        with self._lock:
            if self._own is None:
                try:
                    self._own = self._load()
                except Exception as error:  # of a folder without preprocessor_config.json, or without what reads it
                    logger.error("the processor of %s can't be loaded: %s", self._folder, error)
                    raise refused(part, f"the model's processor can't be loaded here: {error}") from error
            return self._own

    def _load(self) -> Any:
        from transformers import AutoFeatureExtractor, AutoImageProcessor  # importing this takes seconds

        if self.kind == "image":
            return AutoImageProcessor.from_pretrained(self._folder, backend="pil", local_files_only=True)
        return AutoFeatureExtractor.from_pretrained(self._folder, local_files_only=True)


def _as_sent(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64)
