"""Prompts with images and sounds for tiny models, and transformers' word on what follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tandem.engine.contracts.wire.media import MediaItem, digest_ids

PLACEHOLDER = 500


def with_spans(token_ids: npt.NDArray[np.int32], media: Sequence[MediaItem]) -> npt.NDArray[np.int32]:
    """A prompt with the ids of its items' spans put in."""
    spanned = token_ids.copy()
    for item in media:
        spanned[item.start : item.end] = digest_ids(item.digest, item.length)
    return spanned


@dataclass(frozen=True)
class MediaPrompt:
    """`own_ids`: as the model knows them; `token_ids`: as nodes get them."""

    own_ids: list[int]
    media: tuple[MediaItem, ...]

    @property
    def token_ids(self) -> list[int]:
        return with_spans(np.array(self.own_ids, np.int32), self.media).tolist()


def arrays_of(family: str, seed: int) -> dict[str, np.ndarray]:
    """What a processor would make of an item; other seeds make other contents, for qwen2_5_vl and qwen2_audio also of
    other lengths."""
    generator = np.random.default_rng(seed)
    if family == "llava":
        return {"input_ids": _ids(16), "pixel_values": _noise(generator, 1, 3, 28, 28)}
    if family == "qwen2_5_vl":
        height, width = 2 + 2 * (seed % 3), 8
        num_tokens = height * width // 4
        return {
            "input_ids": _ids(num_tokens),
            "mm_token_type_ids": np.ones((1, num_tokens), np.int64),
            "pixel_values": _noise(generator, height * width, 3 * 2 * 7 * 7),
            "image_grid_thw": np.array([[1, height, width]]),
        }
    assert family == "qwen2_audio"
    num_heard = 40 + 20 * (seed % 3)
    heard = (np.arange(100) < num_heard).astype(np.int64)[None]
    features = _noise(generator, 1, 16, 100)
    num_tokens = ((num_heard - 1) // 2 + 1 - 2) // 2 + 1
    return {"input_ids": _ids(num_tokens), "input_features": features, "feature_attention_mask": heard}


def media_prompt(family: str, *parts: Sequence[int] | int) -> MediaPrompt:
    """A prompt of runs of token ids and of items, each given by its seed."""
    own_ids: list[int] = []
    media: list[MediaItem] = []
    kind = "audio" if family == "qwen2_audio" else "image"
    for part in parts:
        if isinstance(part, int):
            arrays = arrays_of(family, part)
            length = arrays["input_ids"].shape[1]
            media.append(MediaItem.of(len(own_ids), length, kind, arrays))  # type: ignore[arg-type]
            own_ids += [PLACEHOLDER] * length
        else:
            own_ids += [token_id for token_id in part if token_id < PLACEHOLDER]
    return MediaPrompt(own_ids, tuple(media))


def check_media_greedy(folder: Path, prompt: MediaPrompt, token_ids: Sequence[int], num_tokens: int) -> None:
    """Asserts that each token is transformers' best after all before it."""
    assert len(token_ids) == num_tokens, f"{len(token_ids)} of {num_tokens} tokens"
    best = media_logits(reference_media_model(folder), prompt, token_ids).argmax(-1).tolist()
    wrong = [index for index, (token, expected) in enumerate(zip(token_ids, best, strict=True)) if token != expected]
    assert not wrong, f"prompt of {len(prompt.own_ids)}: token {wrong[0]} of {num_tokens} differs"


@cache
def reference_media_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"):  # type: ignore[no-untyped-def]
    """transformers' model with its towers, kept in memory."""
    from transformers import AutoModelForMultimodalLM

    return AutoModelForMultimodalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def media_logits(model, prompt: MediaPrompt, token_ids: Sequence[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Logits float32 [len(token_ids), V] on the host, by the model as a whole: of each token, given all before it."""
    own_ids = [*prompt.own_ids, *token_ids]
    arguments: dict[str, torch.Tensor] = {}
    types = np.zeros((1, len(own_ids)), np.int64)
    for name in prompt.media[0].arrays() if prompt.media else ():
        own = [item.arrays()[name] for item in prompt.media]
        if name not in ("input_ids", "mm_token_type_ids"):
            arguments[name] = torch.from_numpy(np.concatenate(own))
    for item in prompt.media:
        types[:, item.start : item.end] = 1
    if "image_grid_thw" in arguments:
        arguments["mm_token_type_ids"] = torch.from_numpy(types)
    arguments["input_ids"] = torch.tensor([own_ids])
    with torch.inference_mode():
        logits: torch.Tensor = model(**{name: each.to(model.device) for name, each in arguments.items()}).logits
    return logits[0, len(prompt.own_ids) - 1 : -1].float().cpu()


def _ids(length: int) -> np.ndarray:
    return np.full((1, length), PLACEHOLDER)


def _noise(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return generator.standard_normal(shape, np.float32)
