"""What every GPU test gets: a process whose CUDA context is lost ends, and memory goes back to the other processes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

KEPT_BYTES = 1 << 30  # a guess: what a process may keep of a GPU that many processes test on


def turn_devices(worker: str) -> None:
    """Lets each process of pytest-xdist (gw0, gw1, ...) begin with another GPU, and see them all. Comes before the
    first use of CUDA."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(index) for index in range(torch.cuda.device_count())] if given is None else given.split(",")
    if len(devices) > 1:
        first = int(worker.removeprefix("gw")) % len(devices)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[first:] + devices[:first])


if "PYTEST_XDIST_WORKER" in os.environ:
    turn_devices(os.environ["PYTEST_XDIST_WORKER"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first, so that nobody waits for them at the end."""
    items.sort(key=lambda item: "test_soak_gpu" not in item.nodeid)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A sticky error fails each later call of its process. The test that caused it has told of its failure when this
    process ends; pytest-xdist starts another for the tests that are left."""
    result = yield
    if not torch.cuda.is_initialized():
        return result
    try:
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
            if torch.cuda.memory_reserved(index) > KEPT_BYTES:
                with torch.cuda.device(index):
                    torch.cuda.empty_cache()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(70)
        pytest.exit(f"the CUDA context is lost after {item.nodeid}: {error}", returncode=70)
    return result


@pytest.fixture(autouse=True)
def _first_device() -> None:
    """Whatever device the test before made its thread's own: nodes of one process do."""
    if torch.cuda.is_available():
        torch.cuda.set_device(0)


@pytest.fixture
def poisoned_memory() -> None:
    """Outputs come from freed memory full of NaN: what a kernel leaves unwritten shows."""
    torch.full((1 << 26,), float("nan"), device="cuda")


@pytest.fixture
def few_threads() -> Iterator[None]:
    """For small models on CPU: a thread for each of many cores makes them slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(4, before))
    yield
    torch.set_num_threads(before)
