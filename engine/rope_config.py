"""Rotary position parameters of a checkpoint, in one normal form. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.engine.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Normalised rope parameters; a field that its type doesn't use keeps its default here.

    "linear" divides positions by `factor`; "llama3" does so for long wavelengths only, blending between the two
    frequency factors; "yarn" (Peng et al. 2023) blends by number of rotations and scales cos and sin by
    `attention_factor`.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_len: int = 0  # llama3, yarn: tokens of the pre-training context
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def max_model_len(self, max_position_embeddings: int) -> int:
        """Tokens that the model was made for. Linear and yarn checkpoints name the length before scaling; a yarn
        checkpoint may also name the length after it."""
        if self.rope_type == "linear":
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_len * self.factor))
        return max_position_embeddings


def parse_rope(values: Mapping[str, Any], max_position_embeddings: int, path: str) -> RopeConfig:
    """From a config.json's `rope_parameters` or `rope_scaling` (older), with `rope_theta` inside or beside it.

    Raises CheckpointError on types that are not built, wrong or missing numbers.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    parameters = values.get(name) or {}
    if not isinstance(parameters, Mapping) or any(isinstance(value, Mapping) for value in parameters.values()):
        raise CheckpointError(f"{path}: {name} must be one flat object, got {parameters!r}")
    given = _Given(path, name, {"rope_theta": values.get("rope_theta"), **parameters})
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(f"{path}: {name} of type {rope_type!r} is not supported, only {', '.join(ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise CheckpointError(f"{path}: partial_rotary_factor {partial!r} is not supported, only 1.0")
    theta = given.number("rope_theta", 10000.0)
    if rope_type == "default":
        return RopeConfig("default", theta)
    if rope_type == "linear":
        return RopeConfig("linear", theta, factor=given.number("factor"))
    beside = values.get("original_max_position_embeddings")
    original = int(beside or given.number("original_max_position_embeddings", max_position_embeddings))
    if rope_type == "llama3":
        return _llama3(given, theta, original, path)
    return _yarn(given, theta, original, max_position_embeddings)


@dataclass(frozen=True)
class _Given:
    path: str
    name: str
    values: Mapping[str, Any]

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0 or math.isinf(value):
            raise CheckpointError(f"{self.path}: {self.name}.{key} must be a positive number, got {value!r}")
        return float(value)


def _llama3(given: _Given, theta: float, original: int, path: str) -> RopeConfig:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{path}: {given.name}.high_freq_factor {high} must exceed low_freq_factor {low}")
    return RopeConfig(
        "llama3",
        theta,
        factor=given.number("factor"),
        original_max_len=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(given: _Given, theta: float, original: int, max_position_embeddings: int) -> RopeConfig:
    factor = given.number("factor", max_position_embeddings / original)
    if given.values.get("attention_factor") is not None:
        attention_factor = given.number("attention_factor")
    elif given.values.get("mscale") and given.values.get("mscale_all_dim"):
        attention_factor = _mscale(factor, given.number("mscale")) / _mscale(factor, given.number("mscale_all_dim"))
    else:
        attention_factor = _mscale(factor, 1.0)
    return RopeConfig(
        "yarn",
        theta,
        factor=factor,
        original_max_len=original,
        beta_fast=given.number("beta_fast", 32.0),
        beta_slow=given.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=given.values.get("truncate") is not False,
    )


def _mscale(factor: float, weight: float) -> float:
    """Yarn's growth of attention logits with the scaling factor."""
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0
