"""What tests of kernels on a GPU share."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.api.backend import Prefill
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.check.sample_batches import PagedBatch

ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper GPU"
    ),
]


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over that of `expected`, which is of float64."""
    return ((output.double() - expected).norm() / expected.norm()).item()


def exact(batch: PagedBatch, spec: AttentionSpec, *scales: float) -> torch.Tensor:
    """Attention of a batch's new tokens in float64, [T, H, D]. The cache holds the earlier ones."""
    query, key, value = batch.query.double(), batch.key.double(), batch.value.double()
    return NativeOps.prefill(Prefill(query, key, value, batch.kv(*scales), batch.metadata.all_rows()), spec)
