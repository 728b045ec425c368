"""The towers of transformers' models: what makes embeddings of images and sounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tandem.engine.contracts.wire.media import MediaItem, MediaKind
from tandem.engine.media.encoder import EncodeError

Arrays = dict[str, np.ndarray]


class Tower(NamedTuple):
    """What an architecture takes, and what the trial gives it: the arguments of one small item, made by its sizes."""

    kind: MediaKind
    example: Callable[[Any], Arrays]


def _llava(config: Any) -> Arrays:
    vision = config.vision_config
    length = (vision.image_size // vision.patch_size) ** 2 + (config.vision_feature_select_strategy == "full")
    pixels = _noise(1, 3, vision.image_size, vision.image_size)
    return {"input_ids": np.full((1, length), config.image_token_id), "pixel_values": pixels}


def _qwen_vl(config: Any) -> Arrays:
    vision = config.vision_config
    merge = vision.spatial_merge_size
    grid = np.array([[1, 2 * merge, 3 * merge]])
    ids = np.full((1, 6), config.image_token_id)
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "mm_token_type_ids": np.ones_like(ids),
        "pixel_values": _noise(int(grid.prod()), patch),
        "image_grid_thw": grid,
    }


def _qwen2_audio(config: Any) -> Arrays:
    audio = config.audio_config
    num_frames = 2 * audio.max_source_positions
    heard = np.zeros((1, num_frames), np.int64)
    heard[:, : num_frames // 2] = 1
    length = ((num_frames // 2 - 1) // 2 + 1 - 2) // 2 + 1
    return {
        "input_ids": np.full((1, length), config.audio_token_id),
        "input_features": _noise(1, audio.num_mel_bins, num_frames),
        "feature_attention_mask": heard,
    }


# What else has a tower serves text alone, or is refused.
TOWERS = {
    "llava": Tower("image", _llava),
    "qwen2_vl": Tower("image", _qwen_vl),
    "qwen2_5_vl": Tower("image", _qwen_vl),
    "qwen2_audio": Tower("audio", _qwen2_audio),
}


def _noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape, np.float32)


def text_attention(config: PreTrainedConfig, name: str) -> str | dict[str, str | None]:
    """`attn_implementation` for a model whose language model is to call attention `name`: its towers keep theirs."""
    if config.model_type not in TOWERS:
        return name
    text = config.get_text_config()
    own = {key: None for key in config.sub_configs if getattr(config, key) is not text}
    return {**own, **{key: name for key in config.sub_configs if key not in own}, "": name}


def forget_positions(causal: nn.Module) -> None:
    """Drops what a model's own class keeps of the items of its last pass: its head would make positions of it, which
    asks the host, and a graph can't."""
    for module in causal.modules():
        if "rope_deltas" in vars(module):
            vars(module).update(rope_deltas=None)


class TowerEncoder:
    """Runs the model's own class, whose language model has been replaced by one that returns the embeddings that it is
    given: so whatever stands between tower and language model is the model's own code. `causal`: that class with its
    head."""

    def __init__(self, causal: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> None:
        self._causal, self._device, self._dtype = causal, device, dtype
        self.tower = TOWERS[causal.config.model_type]
        self.kinds = frozenset({self.tower.kind})
        self._rope_index: Any = getattr(causal.base_model, "get_rope_index", None)
        self.has_positions = self._rope_index is not None

    @torch.inference_mode()
    def encode(self, item: MediaItem) -> torch.Tensor:
        """Embeddings of the item's span, [length, E]. Raises EncodeError, OutOfMemoryError."""
        base: nn.Module = self._causal.base_model
        try:
            return base(**self.arguments(item.arrays()), use_cache=False).last_hidden_state[0]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a tower does to arguments that its processor wouldn't make
            raise EncodeError(f"the {item.kind} can't be encoded: {type(error).__name__}: {error}") from error
        finally:
            forget_positions(self._causal)

    def positions(self, item: MediaItem) -> np.ndarray:
        """Positions of the span's tokens, int64 [3, length]. Raises EncodeError."""
        arrays = item.arrays()
        arguments = {name: torch.from_numpy(arrays[name].copy()) for name in arrays if arrays[name].dtype == np.int64}
        try:
            position_ids, _ = self._rope_index(**arguments)
        except Exception as error:
            raise EncodeError(f"the {item.kind} has no positions: {type(error).__name__}: {error}") from error
        positions: np.ndarray = position_ids[:, 0].numpy()
        return positions

    def arguments(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        """The item's tensors on the device, floats in the model's dtype."""
        tensors = {name: torch.from_numpy(array.copy()).to(self._device) for name, array in arrays.items()}
        return {name: each.to(self._dtype) if each.is_floating_point() else each for name, each in tensors.items()}
