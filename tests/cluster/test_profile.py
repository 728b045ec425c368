"""A single node profiled by HTTP while it serves; split: tests/cluster/test_processes.py."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator

import pytest
from router_in_thread import RouterInThread
from waiting import wait_until

from in_process_cluster import Node, node_options
from tandem.node.profiling import profiler
from tandem.router.metrics.nodes import read_nodes
from tiny_models import check_greedy, random_prompt, tiny_model


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node(node_options("unified", tiny_model("llama")))
    yield node
    node.stop()


@pytest.fixture(scope="module")
def router(node: Node) -> Iterator[RouterInThread]:
    with RouterInThread(tiny_model("llama"), (node.info.control_address,)) as router:
        yield router.wait_ready()


def ask(router: RouterInThread, what: str, **body: object) -> dict:
    answer = router.client.post(f"/profile/{what}", json=body)
    assert answer.status_code == 200, answer.text
    (found,) = answer.json()["nodes"]
    return found


def complete(router: RouterInThread, num_tokens: int) -> None:
    prompt = random_prompt(40, seed=num_tokens)
    body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = router.client.post("/v1/completions", json=body).json()
    check_greedy(tiny_model("llama"), prompt, answer["choices"][0]["token_ids"], num_tokens)


def test_a_profile_ends_by_its_steps_and_is_fetched_once(router: RouterInThread, node: Node) -> None:
    model = node.process.loaded.model
    before = [set(vars(module)) for module in model.modules()]
    assert ask(router, "start", seconds=60, steps=8)["error"] is None
    assert "runs already" in ask(router, "start")["error"]
    complete(router, 20)
    wait_until(lambda: not node.process.profiler._running, "the eighth step")
    assert [set(vars(module)) for module in model.modules()] == before, "nothing is left on"
    found = ask(router, "stop")
    report = found["report"]
    assert (found["role"], report["steps"], report["notes"]) == ("unified", 8, [])
    num_layers = len(model.attention_layers)
    assert [layer["name"] for layer in report["layers"]] == [f"layers.{index}" for index in range(num_layers)]
    assert len(report["attention"]) == num_layers
    for layer, own in zip(report["layers"], report["attention"], strict=True):
        assert layer["calls"] >= 8
        assert 0 < own["ms"] < layer["ms"]
    assert report["launches"] > 0
    assert any("unified_attention" in kernel["name"] for kernel in report["kernels"])
    memory = report["memory"]
    assert memory["weights_bytes"] == sum({each.data_ptr(): each.nbytes for each in model.parameters()}.values())
    assert memory["kv_bytes"] == 256 * node.process.loaded.layout.stride_bytes
    assert memory["activation_peak_bytes"] > 0
    assert 0 < report["batch_fill"] <= 1
    assert 0 < report["busy_share"] <= 1
    assert all(ms >= 0 for ms in report["host_ms_a_step"].values())
    events = json.loads(gzip.decompress(base64.b64decode(found["trace"])))["traceEvents"]
    assert any(event["name"] == "layers.0" for event in events)
    assert "no profile was started" in ask(router, "stop")["error"]


def test_a_profile_ends_by_its_seconds_without_load(router: RouterInThread, node: Node) -> None:
    assert ask(router, "start", seconds=0.05, layers=False)["error"] is None
    wait_until(lambda: not node.process.profiler._running, "its time to be over")
    report = ask(router, "stop")["report"]
    assert (report["steps"], report["layers"]) == (0, [])


def test_what_nobody_fetches_is_dropped(router: RouterInThread, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "KEPT_S", 0.0)
    assert ask(router, "start", seconds=0.05)["error"] is None
    wait_until(lambda: not node.process.profiler.is_on, "the report to be dropped")
    assert "its report is gone" in ask(router, "stop")["error"]


def test_a_report_that_cannot_be_made_costs_itself(router: RouterInThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "make_report", lambda node, finished: 1 / 0)
    assert ask(router, "start")["error"] is None
    assert "can't be made: division by zero" in ask(router, "stop")["error"]
    complete(router, 4)


def test_metrics_have_the_cheap_figures(router: RouterInThread) -> None:
    complete(router, 6)

    def counter(name: str) -> float:
        (node,) = read_nodes(router.client.get("/metrics").text).values()
        return node.figures[name]

    wait_until(lambda: counter("steps_read") >= 6 and counter("kv_used_share") == 0, "a status of after the request")
    steps = counter("steps_read")
    assert steps <= counter("step_rows") <= counter("step_tokens")
    assert 0 < counter("batch_fill") <= steps
    assert min(counter(f"turn_{part}_s") for part in ("schedule", "launch", "results")) > 0
    assert 0 < counter("allocate_s") < counter("turn_schedule_s")
    assert 0 <= counter("kv_fragmentation") < 1
