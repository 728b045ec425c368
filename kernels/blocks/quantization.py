"""fp8 (e4m3) KV: stores saturate at ±448 and count what overflowed; scales are given or computed."""

from __future__ import annotations

import torch

from tandem.kernels.api.errors import UnsupportedOptionError
from tandem.kernels.api.spec import FP8_CACHE_DTYPES

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0
HEADROOM = 2.0  # a guess: later tokens may be so many times as large

Scale = float | torch.Tensor

_overflow_counters: dict[torch.device, torch.Tensor] = {}
_scale_tensors: dict[tuple[float, torch.device], torch.Tensor] = {}


def overflow_counter(device: torch.device) -> torch.Tensor:
    """int64 [1] on `device`, counting the values that fp8 stores had to saturate since the process started."""
    if device not in _overflow_counters:
        with torch.inference_mode(False):  # else nobody outside of that mode could add to it
            _overflow_counters[device] = torch.zeros(1, dtype=torch.int64, device=device)
    return _overflow_counters[device]


def overflow_counts() -> dict[str, int]:
    """Saturated values per device. Waits for the device: for /metrics, not for the step loop."""
    return {str(device): int(counter.item()) for device, counter in _overflow_counters.items()}


def quantize(values: torch.Tensor, scale: Scale, *, counts: bool = True) -> torch.Tensor:
    """fp8 of `values / scale`, saturated; counts overflow (unless told not to, for what was counted already). Infinite
    values saturate and count, NaN stays NaN. A tensor of scales is broadcast."""
    scaled = values.float() / _broadcast(scale, values.device)
    if counts:
        overflow_counter(values.device).add_((scaled.abs() > FP8_MAX).sum())
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)


def dequantize(values: torch.Tensor, scale: Scale, dtype: torch.dtype) -> torch.Tensor:
    """`values` (fp8, any shape) times `scale`, as `dtype`."""
    return (values.to(torch.float32) * _broadcast(scale, values.device)).to(dtype)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as raw bytes: indexing isn't implemented for fp8 everywhere, and moving bytes needs no arithmetic."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8_DTYPE else tensor


def scale_tensor(scale: Scale, device: torch.device) -> torch.Tensor:
    """float32 [1] on `device`, for kernels; made once per value and device."""
    if isinstance(scale, torch.Tensor):
        return scale.reshape(-1)[:1].to(device, torch.float32)
    key = (float(scale), device)
    if key not in _scale_tensors:
        _scale_tensors[key] = torch.tensor([float(scale)], dtype=torch.float32, device=device)
    return _scale_tensors[key]


def scale_for(values: torch.Tensor) -> torch.Tensor:
    """float32 scalar: the scale that maps the largest magnitude of `values` to half of fp8's largest (1.0 for all
    zeros): later values may be larger, and a floating-point format loses no precision by it."""
    if values.numel() == 0:
        return torch.ones((), device=values.device)
    peak = values.detach().abs().amax().float()
    return torch.where((peak > 0) & peak.isfinite(), HEADROOM * peak / FP8_MAX, torch.ones_like(peak))


def check_cache_dtype(kv_cache_dtype: str, cache: torch.Tensor) -> None:
    """Raises UnsupportedOptionError when the name and the tensor's dtype contradict each other."""
    is_fp8_name = kv_cache_dtype in FP8_CACHE_DTYPES
    if is_fp8_name != (cache.dtype == FP8_DTYPE) and kv_cache_dtype != "auto":
        raise UnsupportedOptionError("kv_cache_dtype", f"{kv_cache_dtype!r} does not fit a cache of {cache.dtype}")
    if not is_fp8_name and kv_cache_dtype != "auto" and getattr(torch, kv_cache_dtype) != cache.dtype:
        raise UnsupportedOptionError("kv_cache_dtype", f"{kv_cache_dtype!r} does not fit a cache of {cache.dtype}")


def _broadcast(scale: Scale, device: torch.device) -> Scale:
    return scale.to(device, torch.float32) if isinstance(scale, torch.Tensor) else float(scale)
