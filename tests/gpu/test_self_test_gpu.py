"""Every kernel of the self-test is right on this GPU, for shapes that models have and some that none has."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.triton import TritonBackend
from tandem.kernels.check import self_test
from tandem.kernels.check.kernel_cases import Shape
from tandem.kernels.check.self_test import WORKLOADS, report_backends, run_cases
from tandem.kernels.reference import paged

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def shape_of(heads: int, kv_heads: int, size: int, block: int, dtype: torch.dtype, **options: object) -> Shape:
    spec = AttentionSpec(heads, size, size**-0.5, kv_heads, **options)  # type: ignore[arg-type]
    return Shape(spec, block, dtype, torch.device("cuda"))


SHAPES = {
    "llama": shape_of(32, 8, 128, 64, torch.bfloat16),
    "odd": shape_of(6, 2, 80, 48, torch.float16),
    "one kv head": shape_of(8, 1, 256, 32, torch.bfloat16, logits_soft_cap=30.0),
    "full precision": shape_of(4, 4, 64, 16, torch.float32, sliding_window=70),
    "alibi": shape_of(12, 12, 64, 16, torch.float16, alibi_slopes=torch.tensor(paged.alibi_slopes(12))),
    "fp8": shape_of(16, 2, 128, 64, torch.bfloat16, kv_cache_dtype="fp8"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_are_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES[name]
    if shape.spec.is_fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    monkeypatch.setitem(WORKLOADS, "cuda", WORKLOADS["cpu"])
    monkeypatch.setattr(self_test, "median_seconds", lambda run, device: 1.0)
    results = list(run_cases(shape, [TritonBackend]))
    assert len(results) >= 15
    assert [result for result in results if not result.is_right] == []
    assert [report for report in report_backends(shape) if report.is_chosen]
