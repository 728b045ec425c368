"""A kernel that can't be launched while requests are served: the next backend computes the step, and nobody notices."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.kernels.api import selection
from tandem.kernels.api.backend import AttentionImpl, PagedKV, PagedOps, Prefill
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeBackend, NativeImpl, NativeOps
from tiny_models import random_prompt, reference_greedy, tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
fails_at: set[str] = set()  # operations that can't be launched


def refuse(operation: str) -> None:
    if operation in fails_at:
        raise RuntimeError("CUDA error: too many resources requested for launch")


class FailingOps(NativeOps):
    @staticmethod
    def decode(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        refuse("decode")
        return NativeOps.decode(query, kv, rows, spec)

    @staticmethod
    def prefill(new: Prefill, spec: AttentionSpec) -> torch.Tensor:
        refuse("prefill")
        return NativeOps.prefill(new, spec)


class FailingImpl(NativeImpl):
    ops = FailingOps


class FailingBackend(NativeBackend):
    @staticmethod
    def get_name() -> str:
        return "FAILING"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return FailingImpl

    @staticmethod
    def get_ops() -> type[PagedOps]:
        return FailingOps


@pytest.fixture
def failing_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts a backend that fails as `fails_at` says before all others."""
    module = ModuleType("tandem.kernels.backends.failing")
    module.FailingBackend = FailingBackend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = (("failing", "FailingBackend"), *selection.TABLE)
    monkeypatch.setattr(selection, "TABLE", table)
    monkeypatch.setattr(selection, "NAMES", tuple(name for name, _ in table))
    fails_at.clear()


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill")], ids=["one node", "split"])
@pytest.mark.usefixtures("failing_first")
def test_requests_are_served_by_the_next_backend(roles: tuple[str, ...]) -> None:
    folder = tiny_model("llama")
    nodes = [Node(node_options(role, folder, num_blocks=64)) for role in roles]
    prefill = nodes[1].info if len(nodes) > 1 else None
    with client_of(nodes) as client:
        for length, failing in ((40, ()), (41, ("prefill",)), (42, ("decode",)), (43, ("prefill", "decode"))):
            fails_at.clear()
            fails_at.update(failing)
            before = sum(selection.fallback_counts().values())
            prompt = random_prompt(length, seed=length)
            result = client.submit(f"r{length}", prompt, GREEDY, decode=nodes[0].info, prefill=prefill)
            client.wait(result)
            assert result.failed is None, result.failed
            assert result.output() == reference_greedy(folder, prompt, 12).token_ids
            assert (sum(selection.fallback_counts().values()) > before) == bool(failing), failing
