"""Products try themselves before they serve: what a kernel gives on this device, made by this compiler, is compared
with torch's once. A kernel that is wrong or fails is not used, and the log says so."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

TOLERANCE = 1e-2  # of the norm of the difference; rounding to 8 bits gives 2e-3; a guess


def passes(
    name: str, ours: Callable[[], torch.Tensor], torchs: Callable[[], torch.Tensor], tolerance: float = TOLERANCE
) -> bool:
    """Whether both give the same, up to rounding. Waits for the device. Raises RuntimeError while a graph is captured:
    then it is too late to find out."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"{name} would be tried while a graph is captured: run the step once before")
    try:
        expected = torchs()
        error = relative_error(ours(), expected)
    except Exception as failure:
        logger.warning("%s failed its trial and is not used: %s", name, failure)
        return False
    if not error <= tolerance:  # NaN is wrong, too
        logger.warning("%s was wrong by %.1e in its trial and is not used", name, error)
        return False
    return True


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what was expected. Waits for the device."""
    expected = expected.float()
    return ((actual.float() - expected).norm() / expected.norm()).item()


def random_matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """[rows, columns], normal with a deviation of 0.05."""
    generator = torch.Generator(device).manual_seed(seed)
    return (0.05 * torch.randn(rows, columns, generator=generator, device=device)).to(dtype)
