"""The selection table, refusals that name their reason, and what may fall to the next backend at run time."""

from __future__ import annotations

import pytest
import torch

from tandem.kernels.api import selection
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.errors import BackendUnavailableError
from tandem.kernels.api.selection import NAMES, fallback_counts, is_launch_failure, load_backend, select_backend
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeBackend, NativeImpl
from tandem.kernels.backends.torch_flash import TorchFlashBackend
from tandem.kernels.check.sample_batches import random_batch

SPEC = AttentionSpec(4, 16, 0.3, 2)


def test_order_of_the_table() -> None:
    assert NAMES == ("flash_attn", "flashinfer", "triton", "torch_flash", "xformers", "native")


@pytest.mark.parametrize("name", NAMES)
def test_every_backend_answers_the_whole_interface(name: str) -> None:
    backend = load_backend(name)
    assert backend is load_backend(backend.get_name())
    assert backend.get_kv_cache_shape(3, 64, 2, 16) == (3, 2, 2, 64, 16)
    assert backend.get_builder_cls()().build([1], [1], [[0]], [0]).num_decode_rows == 1
    assert backend.get_impl_cls()(SPEC).spec is SPEC
    assert callable(backend.get_ops().prefill)
    reason = backend.unavailable_reason()
    assert backend.is_available() == (reason is None)
    assert reason is None or len(reason) > 10


def test_cpu_takes_native_and_says_why() -> None:
    backend, reason = select_backend("cpu", torch.float32, 16, SPEC)
    assert backend is NativeBackend
    assert all(f"{name}: " in reason for name in NAMES[:-1])
    assert select_backend("cpu", torch.float32, 16, SPEC, "native") == (NativeBackend, "requested")


def test_a_request_that_cannot_be_met_names_the_reason_and_what_works() -> None:
    with pytest.raises(BackendUnavailableError, match=r"'torch_flash': .*; usable here: .*native"):
        select_backend("cpu", torch.float32, 16, SPEC, "torch_flash")
    with pytest.raises(BackendUnavailableError, match="int64"):
        select_backend("cpu", torch.int64, 16, SPEC, "native")


@pytest.mark.parametrize(
    ("error", "falls"),
    [
        (RuntimeError("CUDA error: too many resources requested for launch"), True),
        (RuntimeError("workspace buffer is too small"), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (NotImplementedError("no kernel for this"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (ValueError("key and value cache differ"), False),
    ],
)
def test_which_failures_fall_to_the_next_backend(error: Exception, falls: bool) -> None:
    assert is_launch_failure(error) is falls


class FailingImpl(NativeImpl):
    error: Exception

    def forward(self, *arguments: object) -> torch.Tensor:  # type: ignore[override]
        raise self.error


class FailingBackend(TorchFlashBackend):
    """Stands first in the table and fails each launch."""

    @staticmethod
    def get_impl_cls() -> type[NativeImpl]:
        return FailingImpl


@pytest.fixture
def failing_layer(monkeypatch: pytest.MonkeyPatch) -> Attention:
    layer = Attention(4, 16, 0.3, 2)
    chain = [FailingBackend, NativeBackend]
    monkeypatch.setattr(layer, "backends", lambda *_: chain)
    return layer


def test_a_failed_launch_falls_with_a_warning_and_a_count(
    failing_layer: Attention, caplog: pytest.LogCaptureFixture
) -> None:
    FailingImpl.error = RuntimeError("out of resource: shared memory")
    batch = random_batch((1, 6), (20, 22))
    before = fallback_counts().get(("TORCH_FLASH", "NATIVE"), 0)
    output = failing_layer(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)
    torch.testing.assert_close(output.double(), batch.expected(SPEC), rtol=2e-6, atol=2e-6)
    assert fallback_counts()["TORCH_FLASH", "NATIVE"] == before + 1
    assert "NATIVE serves this step" in caplog.text


def test_sticky_errors_and_bugs_are_raised(failing_layer: Attention) -> None:
    batch = random_batch((1,), (20,))
    for error in (RuntimeError("CUDA error: an illegal memory access was encountered"), ValueError("bug")):
        FailingImpl.error = error
        with pytest.raises(type(error), match=str(error)):
            failing_layer(batch.query, batch.key, batch.value, batch.kv_layer, batch.metadata)


def test_the_last_backend_has_nowhere_to_fall() -> None:
    def attempt(_: object) -> torch.Tensor:
        raise RuntimeError("out of resource")

    with pytest.raises(RuntimeError, match="out of resource"):
        selection.run_with_fallback([NativeBackend], attempt)
