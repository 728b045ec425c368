"""A kernel that can't be launched while requests are served: the next backend computes the step, a fused operation's
parts do, or the kernels of a graph, and nobody notices; after the last way the node's epoch ends. And what else the
engine asks of the backend that it has chosen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import ModuleType
from typing import Any

import pytest
import torch
from handmade_steps import RunsDirectly
from router_in_thread import RouterInThread
from waiting import wait_until

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.running.graphs.decode_batch import DecodeBatch
from tandem.engine.scheduling.step import ScheduledRow
from tandem.kernels.api import selection
from tandem.kernels.api.backend import AttentionBackend, AttentionImpl, PagedKV, PagedOps, Prefill
from tandem.kernels.api.errors import BackendUnavailableError
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder, RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.native import NativeBackend, NativeImpl, NativeOps
from tandem.kernels.products import fused_ops
from tandem.kernels.triton_kernels.products import fused
from tandem.kernels.triton_kernels.sampling import argmax
from tiny_models import random_prompt, reference_greedy, tiny_model

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
fails_at: set[str] = set()  # operations that can't be launched


def refuse_launch() -> None:
    raise RuntimeError("CUDA error: too many resources requested for launch")


def refuse(operation: str) -> None:
    if operation in fails_at:
        refuse_launch()


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


class OwnMetadata(AttentionMetadata):
    """What a backend may have of its own."""


class OwnBuilder(AttentionMetadataBuilder):
    def build(self, *arguments: Any, **more: Any) -> OwnMetadata:
        metadata = super().build(*arguments, **more)
        return OwnMetadata(**{each.name: getattr(metadata, each.name) for each in fields(metadata)})


class PickyImpl(NativeImpl):
    """Takes metadata of its own class alone."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: PagedKV | None, meta: AttentionMetadata
    ) -> torch.Tensor:
        assert type(meta) is OwnMetadata, f"a step described by {type(meta)}"
        return super().attend(query, key, value, kv, meta)


class PickyBackend(NativeBackend):
    @staticmethod
    def get_name() -> str:
        return "PICKY"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        return PickyImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return OwnMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return OwnBuilder


class FlatBackend(NativeBackend):
    """Wants keys and values apart."""

    @staticmethod
    def get_name() -> str:
        return "FLAT"

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (2, num_blocks, block_size * num_kv_heads * head_size)


PutFirst = Callable[[type[AttentionBackend]], None]


@pytest.fixture
def put_first(monkeypatch: pytest.MonkeyPatch) -> PutFirst:
    """Puts a backend before all others."""

    def put(backend: type[AttentionBackend]) -> None:
        name = backend.get_name().lower()
        module = ModuleType(f"tandem.kernels.backends.{name}")
        setattr(module, backend.__name__, backend)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        table = ((name, backend.__name__), *selection.TABLE)
        monkeypatch.setattr(selection, "TABLE", table)
        monkeypatch.setattr(selection, "NAMES", tuple(name for name, _ in table))

    return put


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill")], ids=["one node", "split"])
def test_requests_are_served_by_the_next_backend(put_first: PutFirst, roles: tuple[str, ...]) -> None:
    put_first(FailingBackend)
    folder = tiny_model("llama")
    nodes = [Node(node_options(role, folder, num_blocks=64)) for role in roles]
    prefill = nodes[1].info if len(nodes) > 1 else None
    fails_at.clear()
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


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill")], ids=["one node", "split"])
def test_steps_are_described_as_the_chosen_backend_says(put_first: PutFirst, roles: tuple[str, ...]) -> None:
    """Of the two before the others, one keeps KV in another shape than pools have: it doesn't serve."""
    put_first(PickyBackend)
    put_first(FlatBackend)
    folder, prompt = tiny_model("llama"), random_prompt(40, seed=1)
    nodes = [Node(node_options(role, folder, num_blocks=64)) for role in roles]
    for node in nodes:
        for layer in node.process.loaded.model.attention_layers.values():
            assert layer.first_backend() is PickyBackend
            with pytest.raises(
                BackendUnavailableError, match=r"'flat': keeps a block of KV as \[2, 1, 512\], and pools"
            ):
                selection.select_backend("cpu", torch.float32, layer.spec.head_size, layer.spec, "flat", 16)
    with client_of(nodes) as client:
        prefill = nodes[1].info if len(nodes) > 1 else None
        result = client.submit("r", prompt, GREEDY, decode=nodes[0].info, prefill=prefill)
        client.wait(result)
        assert result.failed is None, result.failed
        assert result.output() == reference_greedy(folder, prompt, 12).token_ids


@pytest.fixture
def fails_when_fused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fused operations seem to run on CPU, by their twins. The names put here can't be launched, each once."""
    armed: list[str] = []

    def let_run(module: ModuleType, name: str, twin: Callable[..., torch.Tensor]) -> None:
        def launch(*arguments: Any) -> torch.Tensor:
            if name in armed:
                armed.remove(name)
                refuse_launch()
            with fused_ops.unfused():
                return twin(*arguments)

        monkeypatch.setattr(module, f"{name}_triton", launch)

    def norm(x: torch.Tensor, residual: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        return fused_ops.rms_norm(x, *rest) if residual is None else fused_ops.add_rms_norm(x, residual, *rest)

    let_run(fused, "embedding", fused_ops.embedding)
    let_run(fused, "rms_norm", norm)
    let_run(fused, "silu_mul", fused_ops.silu_mul)
    let_run(argmax, "argmax", fused_ops.argmax_tokens)
    monkeypatch.setattr(fused_ops, "is_fused", lambda tensor: fused_ops.may_fuse())
    return armed


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill")], ids=["one node", "split"])
def test_a_step_whose_fused_operations_fail_is_computed_without_them(
    fails_when_fused: list[str], roles: tuple[str, ...]
) -> None:
    folder = tiny_model("llama")
    nodes = [Node(node_options(role, folder, num_blocks=64)) for role in roles]
    prefill = nodes[1].info if len(nodes) > 1 else None
    with client_of(nodes) as client:
        for length, failing in ((40, ()), (41, ("rms_norm",)), (42, ("silu_mul",)), (43, ("argmax",))):
            before = selection.fallback_counts().get(("a fused operation", "torch"), 0)
            fails_when_fused.extend(failing)
            prompt = random_prompt(length, seed=length)
            result = client.submit(f"r{length}", prompt, GREEDY, decode=nodes[0].info, prefill=prefill)
            client.wait(result)
            assert result.failed is None, result.failed
            assert result.output() == reference_greedy(folder, prompt, 12).token_ids
            assert not fails_when_fused, "a failure did not strike"
            assert selection.fallback_counts().get(("a fused operation", "torch"), 0) == before + len(failing)


class FailingGraphs(RunsDirectly):
    """Every second replay can't be launched."""

    def run(self, rows: Sequence[ScheduledRow]) -> torch.Tensor:
        logits = super().run(rows)
        if self.num_runs % 2:
            refuse_launch()
        return logits


def test_a_graph_that_cannot_be_launched_is_run_kernel_by_kernel() -> None:
    folder, prompt = tiny_model("llama"), random_prompt(40, seed=2)
    node = Node(node_options("unified", folder, num_blocks=64))
    runner = node.process.runner
    batch = DecodeBatch(runner.model, runner.state, runner.max_graph_rows, runner.max_model_len)
    runner._graphs = graphs = FailingGraphs(batch)
    with client_of([node]) as client:
        result = client.submit("r", prompt, GREEDY, decode=node.info)
        client.wait(result)
        assert result.failed is None, result.failed
        assert result.output() == reference_greedy(folder, prompt, 12).token_ids
    assert graphs.num_runs >= 11
    assert selection.fallback_counts()["a CUDA graph", "launching kernel by kernel"] >= graphs.num_runs // 2


@pytest.fixture
def failing_twice(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Length -> how often the last backend can't launch attention of a token at such a place."""
    armed: dict[int, int] = {}
    decode = NativeOps.decode

    def failing(query: torch.Tensor, kv: PagedKV, rows: RowBatch, spec: AttentionSpec) -> torch.Tensor:
        if armed.get(rows.seq_lens_cpu[0]):
            armed[rows.seq_lens_cpu[0]] -= 1
            raise RuntimeError(f"CUDA error: too many resources requested for launch {rows.seq_lens_cpu[0]}")
        return decode(query, kv, rows, spec)

    monkeypatch.setattr(NativeOps, "decode", staticmethod(failing))
    return armed


@pytest.mark.parametrize("roles", [("unified",), ("decode", "prefill", "decode", "prefill")], ids=["one node", "split"])
def test_after_the_last_backend_the_epoch_ends(
    failing_twice: dict[int, int], caplog: pytest.LogCaptureFixture, roles: tuple[str, ...]
) -> None:
    """Who asked a lone node hears that it is lost; where there is another node, the request goes on there."""
    folder, prompt = tiny_model("llama"), random_prompt(40, seed=1)
    nodes = [Node(node_options(role, folder, num_blocks=64)) for role in roles]
    addresses = tuple(node.info.control_address for node in nodes)
    is_alone = len(roles) == 1
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lengths = (
        (45,) if is_alone else (40, 45)
    )  # of a prefill node, which computes its last layer's last token so; and on
    with RouterInThread(folder, addresses, max_attempts=1 if is_alone else 3, local_tail_tokens=0) as router:
        wait_until(lambda: len(router.client.get("/ready").json().get("nodes", ())) == len(roles), "all nodes")
        failing_twice.update(dict.fromkeys(lengths, 2))  # the step, and the step without fused operations
        answer = router.client.post("/v1/completions", json=body)
        assert not any(failing_twice.values()), "a failure did not strike"
        if is_alone:
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "node_failed"), answer.text
        else:
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["token_ids"] == reference_greedy(folder, prompt, 12).token_ids
        router.wait_idle()
    ended = [record for record in caplog.records if "this node's epoch ends" in record.getMessage()]
    causes = [str(record.exc_info[1]) for record in ended if record.exc_info]
    assert causes == [f"CUDA error: too many resources requested for launch {each}" for each in lengths]
    for node in nodes:
        node.process.loop.begin_drain()
        node.wait_until_over()
