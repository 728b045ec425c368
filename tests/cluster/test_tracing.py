"""Traces: one for each request, with its stages under it and its client above it, on one node and on two."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from otlp_collector import OtlpCollector, plain
from router_in_thread import RouterInThread
from waiting import PATIENCE_S

from in_process_cluster import Node, node_options
from tandem.engine.contracts.errors import ConfigError
from tandem.router.tracing.exporter import checked_endpoint

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo_model"
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "shop=7", "X-Request-Id": "mine"}
BODY: dict[str, Any] = {"prompt": "def read_lines(path):" * 4, "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module", params=["unified", "prefill decode"])
def nodes(request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    found = [Node(node_options(role, DEMO)) for role in request.param.split()]
    yield found
    for node in found:
        node.stop()


def router_of(nodes: list[Node], collector: OtlpCollector, **options: Any) -> RouterInThread:
    addresses = tuple(node.info.control_address for node in nodes)
    return RouterInThread(DEMO, addresses, otlp_traces_endpoint=collector.url, local_tail_tokens=0, **options)


def check_order(root: Any, stages: list[Any]) -> None:
    """Stages follow each other without gaps, within the request."""
    for stage in stages:
        assert (stage.trace_id, stage.parent_span_id) == (root.trace_id, root.span_id)
        assert root.start_time_unix_nano <= stage.start_time_unix_nano <= stage.end_time_unix_nano
        assert stage.end_time_unix_nano <= root.end_time_unix_nano
    for before, after in pairwise(stages):
        assert before.end_time_unix_nano == after.start_time_unix_nano


def check_parts(parts: list[Any], stages: dict[bytes, Any], nodes: list[Node]) -> None:
    """What nodes did stands under the stage in which it began, by the node that did it."""
    kinds = {"prefill chunk": nodes[0], "push KV": nodes[0], "verify KV": nodes[-1]}
    assert {part.name for part in parts} == set(list(kinds)[: 3 if len(nodes) > 1 else 1])
    for part in parts:
        stage, said = stages[part.parent_span_id], plain(part.attributes)
        assert part.trace_id == stage.trace_id
        assert part.end_time_unix_nano > part.start_time_unix_nano
        assert said["tandem.node"] == kinds[part.name].info.node_id
        assert said.get("tandem.tokens", 1) > 0
    events = {event.name for stage in stages.values() for event in stage.events}
    assert "hears of the request" in events
    assert len(nodes) == 1 or {"asks for blocks for its KV", "has verified the KV and goes on"} <= events


def test_each_request_is_one_trace(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.router.watching.desk.STORY_S", PATIENCE_S)
    monkeypatch.setattr("tandem.router.tracing.exporter.FLUSH_S", PATIENCE_S)
    is_split = len(nodes) > 1
    with OtlpCollector() as collector:
        with router_of(nodes, collector) as router:
            router.wait_ready()
            bodies = [BODY, {**BODY, "stream": True}, {**BODY, "prompt": ["one", "two"], "n": 2}]
            for body in bodies:
                assert router.client.post("/v1/completions", json=body, headers=HEADERS).status_code == 200
            chat = {"messages": [{"role": "user", "content": "x = "}], "max_tokens": 1, "temperature": 0}
            assert router.client.post("/v1/chat/completions", json=chat).status_code == 200
            assert router.client.post("/v1/completions", json={"prompt": 7}).status_code == 400
            assert router.client.get("/health", headers=HEADERS).status_code == 200
        spans = collector.spans  # whoever ends has sent all
    assert collector.paths == {"/v1/traces"}
    assert {each["service.name"] for each in collector.resources} == {"tandem-router"}
    roots = [span for span in spans if span.kind == 2]  # servers
    assert [root.name for root in roots] == ["text_completion demo_model"] * 3 + ["chat demo_model", "text_completion"]
    children = {root.span_id: [span for span in spans if span.parent_span_id == root.span_id] for root in roots}
    stages_by_id = {span.span_id: span for of_root in children.values() for span in of_root}
    parts = [span for span in spans if span.parent_span_id in stages_by_id]
    assert len(parts) + len(stages_by_id) + len(roots) == len(spans)
    check_parts(parts, stages_by_id, nodes)
    names = ["queue", "prefill", "transfer", "decode"] if is_split else ["queue", "prefill", "decode"]
    for root in roots[:2]:
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, PARENT, "shop=7")
        assert [span.name for span in children[root.span_id]] == names
        check_order(root, children[root.span_id])
        said = {span.name: plain(span.attributes) for span in children[root.span_id]}
        assert said["prefill"]["tandem.node"] == nodes[0].info.node_id
        assert said["decode"]["tandem.node"] == nodes[-1].info.node_id
        facts = plain(root.attributes)
        assert facts["gen_ai.usage.output_tokens"] == said["decode"]["gen_ai.usage.output_tokens"] == 6
        assert facts["gen_ai.usage.input_tokens"] == said["prefill"]["gen_ai.usage.input_tokens"] > 16
        assert facts["gen_ai.response.finish_reasons"] == ["length"]
        assert facts["http.response.status_code"] == 200
        assert facts["tandem.request_id"] == "mine"
        assert facts["gen_ai.response.id"].startswith("cmpl-")
    for index in (0, 1):  # of the prompts in one request
        stages = [s for s in children[roots[2].span_id] if plain(s.attributes)["tandem.prompt"] == index]
        check_order(roots[2], stages)
        assert {"queue", "prefill", "decode"} <= {stage.name for stage in stages}
    assert [span.name for span in children[roots[3].span_id]] == ["queue", "prefill"], "one token, and no parent"
    assert roots[3].trace_id.hex() != TRACE
    assert not roots[3].parent_span_id
    assert (plain(roots[4].attributes)["http.response.status_code"], children[roots[4].span_id]) == (400, [])


def test_who_did_not_sample_gets_no_trace_and_a_stuck_collector_ends_nobody(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tandem.router.tracing.exporter.FLUSH_S", 0.2)
    with OtlpCollector() as collector:
        with router_of(nodes, collector) as router:
            router.wait_ready()
            unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
            assert router.client.post("/v1/completions", json=BODY, headers=unsampled).status_code == 200
            assert router.client.post("/v1/completions", json=BODY, headers={"traceparent": "rubbish"}).is_success
            collector.released.clear()
        assert collector.asked.wait(60), "it was tried"
        assert "did not take all" in caplog.text
        assert collector.spans == []
        with pytest.raises(httpx.ConnectError):  # and the router is gone
            httpx.get(router.url)


def test_an_endpoint_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_endpoint("http://collector:4318") == "http://collector:4318/v1/traces"
    assert checked_endpoint("https://c/otlp/v1/traces") == "https://c/otlp/v1/traces"
    for wrong in ("grpc://collector:4317", "collector:4318", "http://"):
        with pytest.raises(ConfigError, match="4318/v1/traces"):
            checked_endpoint(wrong)
    monkeypatch.setattr("tandem.router.tracing.exporter.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-serve\[otel\]'"):
        checked_endpoint("http://collector:4318")
