"""What tests of kernels on a GPU share."""

from __future__ import annotations

import pytest
import torch

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`, which is of float64."""
    return ((output.double() - expected).norm() / expected.norm()).item()
