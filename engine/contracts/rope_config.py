"""What config.json says about rotary embeddings, read as transformers reads it. No torch.

Two places may say it: `rope_parameters`, with the base inside, and the older `rope_scaling` beside `rope_theta`. Where
both do, transformers takes `rope_scaling` whole and forgets the other, base included.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10000.0
LAYER_TYPES = ("full_attention", "sliding_attention")

Positive = Annotated[float, Meta(gt=0)]
Length = Annotated[int, Meta(gt=0, lt=1 << 31)]


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding; which fields count depends on `rope_type`."""

    rope_type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def max_model_len(self, max_position_embeddings: int) -> int:
        """The longest sequence, in tokens. Linear checkpoints name the length before scaling, yarn checkpoints that or
        the one after it."""
        if self.rope_type == "linear":
            return int(max_position_embeddings * self.factor)
        if self.rope_type == "yarn":
            return max(max_position_embeddings, int(self.original_max_position_embeddings * self.factor))
        return max_position_embeddings


class RopeFields(msgspec.Struct, kw_only=True):
    """The fields of config.json itself that have to do with rotary embeddings."""

    default_theta: ClassVar[float] = DEFAULT_THETA
    max_position_embeddings: Length
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive | UnsetType | None = UNSET
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Length | UnsetType | None = UNSET


class _Given(msgspec.Struct, kw_only=True):
    """The fields of `rope_parameters` or `rope_scaling`."""

    rope_type: str | UnsetType = UNSET
    type: str = "default"
    rope_theta: Positive | UnsetType = UNSET
    partial_rotary_factor: float = 1.0
    factor: Positive | UnsetType | None = UNSET
    original_max_position_embeddings: Length | UnsetType = UNSET
    low_freq_factor: Positive | UnsetType = UNSET
    high_freq_factor: Positive | UnsetType = UNSET
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def read_rope(fields: RopeFields) -> RopeConfig:
    """The rotary embedding that these fields of config.json describe. Raises ValueError that names the field."""
    name, values = "rope_scaling", fields.rope_scaling
    if not values:
        name, values = "rope_parameters", fields.rope_parameters or {}
    if any(isinstance(value, dict) for value in values.values()) or not values.keys().isdisjoint(LAYER_TYPES):
        raise ValueError(f"{name} differs from layer to layer, which is not supported")
    try:
        given = msgspec.convert(values, _Given)
    except msgspec.ValidationError as error:
        raise ValueError(f"in {name}: {error}") from None
    rope_type = given.type if given.rope_type is UNSET else given.rope_type
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"{name}: rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    for partial in (fields.partial_rotary_factor, given.partial_rotary_factor):
        if partial not in (None, 1.0):
            raise ValueError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    theta = _theta(fields, given, name)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=_needed(given, name, "factor"))
    if rope_type == "llama3":
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=_needed(given, name, "factor"),
            low_freq_factor=_needed(given, name, "low_freq_factor"),
            high_freq_factor=_needed(given, name, "high_freq_factor"),
            original_max_position_embeddings=_original_length(fields, given),
        )
    return _yarn(fields, given, name, theta)


def _yarn(fields: RopeFields, given: _Given, name: str, theta: float) -> RopeConfig:
    if theta <= 1:
        raise ValueError(f"rope_theta {theta} is too small for yarn: it must be above 1")
    original = _original_length(fields, given)
    factor = given.factor
    if factor is None:  # said to follow from the two lengths
        factor = fields.max_position_embeddings / original
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=_needed(given, name, "factor") if factor is UNSET else factor,
        original_max_position_embeddings=original,
        beta_fast=_positive(given.beta_fast or 32.0, "beta_fast"),
        beta_slow=_positive(given.beta_slow or 1.0, "beta_slow"),
        attention_factor=given.attention_factor,
        mscale=given.mscale,
        mscale_all_dim=given.mscale_all_dim,
        truncate=given.truncate,
    )


def _theta(fields: RopeFields, given: _Given, name: str) -> float:
    beside = fields.default_theta if fields.rope_theta is UNSET else fields.rope_theta
    theta = beside if given.rope_theta is UNSET else given.rope_theta
    if theta is None:
        raise ValueError("rope_theta is null; name the base, or take the field out for 10000")
    forgotten = (fields.rope_parameters or {}).get("rope_theta", theta)
    if name == "rope_scaling" and forgotten != theta:
        raise ValueError(
            f"rope_scaling stands beside rope_parameters and takes its place, whose rope_theta {forgotten} would no "
            f"longer hold but {theta}; put rope_theta into rope_scaling, or both into rope_parameters alone"
        )
    return theta


def _original_length(fields: RopeFields, given: _Given) -> int:
    """The length in tokens that was trained on: config.json's field, else the rope parameters', else the model's."""
    for length in (fields.original_max_position_embeddings, given.original_max_position_embeddings):
        if length is None:
            raise ValueError("original_max_position_embeddings is null; name the length or take the field out")
        if length is not UNSET:
            return length
    return fields.max_position_embeddings


def _needed(given: _Given, name: str, field: str) -> float:
    value = getattr(given, field)
    if value is UNSET or value is None:
        raise ValueError(f"{field!r} is missing in {name}")
    return float(value)


def _positive(value: float, field: str) -> float:
    if value <= 0:
        raise ValueError(f"rope {field} must be positive, got {value}")
    return value
