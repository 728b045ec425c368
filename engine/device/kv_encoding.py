"""The form in which a node keeps KV: the dtype that it computes in, or another one, and the scales of fp8."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from tandem.engine.contracts.config import CacheOptions
from tandem.engine.contracts.errors import ConfigError

_TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn"}


class LayerScales(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a `kv_scales` file: the scales of keys and of values, one for each layer; value = stored * scale."""

    k: tuple[float, ...]
    v: tuple[float, ...]


@dataclass(frozen=True)
class KVEncoding:
    """The pool's dtype, and for fp8 its scales; `scales` None: 1.0 for every layer."""

    dtype: torch.dtype
    scales: LayerScales | None = None


def choose_kv_encoding(
    options: CacheOptions, computed_in: torch.dtype, device: torch.device, num_layers: int
) -> KVEncoding:
    """The encoding that `options` ask for. Raises ConfigError for a dtype that `device` has no kernels for, and for
    scales that don't fit."""
    name = options.kv_cache_dtype
    dtype = computed_in if name == "auto" else getattr(torch, _TORCH_NAMES.get(name, name))
    is_fp8 = dtype == torch.float8_e4m3fn
    if device.type == "cuda" and dtype != computed_in and not is_fp8:
        raise ConfigError(f"--kv-cache-dtype {name} on a GPU: choose auto or fp8_e4m3, {computed_in} is computed in")
    if options.calculate_kv_scales and (options.kv_scales or not is_fp8):
        raise ConfigError("--calculate-kv-scales is for --kv-cache-dtype fp8_e4m3, in place of --kv-scales")
    if not options.kv_scales:
        return KVEncoding(dtype)
    if not is_fp8:
        raise ConfigError("--kv-scales are for --kv-cache-dtype fp8_e4m3: give both or neither")
    return KVEncoding(dtype, _read_scales(Path(options.kv_scales), num_layers))


def _read_scales(path: Path, num_layers: int) -> LayerScales:
    try:
        scales = msgspec.json.decode(path.read_bytes(), type=LayerScales)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f'--kv-scales {path}: {error}; expected {{"k": [a scale a layer], "v": […]}}') from error
    if {len(scales.k), len(scales.v)} != {num_layers}:
        raise ConfigError(
            f"--kv-scales {path} has {len(scales.k)} and {len(scales.v)} scales; the model has {num_layers} layers"
        )
    if not all(0 < scale < float("inf") for scale in (*scales.k, *scales.v)):
        raise ConfigError(f"--kv-scales {path}: a scale must be above 0")
    return scales
