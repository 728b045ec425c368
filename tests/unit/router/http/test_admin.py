"""What operators do to nodes and ask of requests, at a router of two processes whose keys have scopes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from xml.etree import ElementTree

import pytest
from router_in_thread import FAST, VOCAB_SIZE, RouterInThread
from waiting import PATIENCE_S, wait_until

from stand_in_node import StandInNode, stand_in_nodes
from tandem.deploy.cli import main
from tandem.router.placing.siblings import make_seats

ADMIN = {"Authorization": "Bearer sk-admin"}
PATHS = (("POST", "/admin/drain"), ("POST", "/admin/role"), ("GET", "/admin/requests"), ("GET", "/admin/requests/x"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[StandInNode]]:
    with stand_in_nodes(2, VOCAB_SIZE) as found:
        yield found


@pytest.fixture(scope="module")
def workers(
    folder: Path, nodes: list[StandInNode], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[RouterInThread]]:
    place = tmp_path_factory.mktemp("group")
    (place / "keys.yaml").write_text("keys: {sk-user: {scopes: [inference]}, sk-admin: {}}")
    seats = make_seats(place / "placements", 2)
    addresses = tuple(node.address for node in nodes)
    with ExitStack() as stack:
        found = [
            stack.enter_context(RouterInThread(folder, addresses, seat=seat, api_keys_file=str(place / "keys.yaml")))
            for seat in seats
        ]
        for worker in found:
            worker.client.headers.update(ADMIN)
            wait_until(lambda worker=worker: len(worker.worker.service.cluster.serving()) == 2, "two nodes")
        yield found


@pytest.fixture
def router(workers: list[RouterInThread], nodes: list[StandInNode]) -> RouterInThread:
    for node in nodes:
        node.draining = node.deaf_to_drain = False
    for worker in workers:
        wait_until(lambda worker=worker: not any(v.draining for v in worker.worker.service.cluster.views), "all serve")
    return workers[0]


def test_all_of_it_is_for_admins(router: RouterInThread) -> None:
    for method, path in PATHS:
        assert router.client.request(method, path, headers={"Authorization": "Bearer sk-user"}).status_code == 403
        assert router.client.request(method, path, headers={"Authorization": ""}).status_code == 401


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("drain", b"", 400, "JSON"),
        ("drain", b"{}", 400, "node"),
        ("drain", b'{"node": ""}', 400, "node"),
        ("drain", b'{"node": 7}', 400, "node"),
        ("drain", b'{"node": "n0", "undoo": true}', 400, "undo"),
        ("drain", b'{"node": "n0", "undo": "yes"}', 400, "undo"),
        ("drain", b'{"node": "<b>n9</b>"}', 404, "n0, n1"),
        ("role", b'{"node": "n0", "role": "king"}', 400, "role"),
        ("role", b'{"node": "n9", "role": "decode"}', 404, "n0, n1"),
        ("role", b'{"node": "n0", "role": "decode"}', 409, "--placement elastic"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_reason(
    router: RouterInThread, path: str, body: bytes, status: int, said: str
) -> None:
    answer = router.client.post(f"/admin/{path}", content=body)
    assert answer.status_code == status, answer.text
    assert said in answer.json()["error"]["message"]


def test_a_request_that_nobody_knows_is_not_found(router: RouterInThread) -> None:
    for name in ("nobody", "a/b?c", "%00", "é" * 100):
        assert router.client.get(f"/admin/requests/{name}").json()["error"]["code"] == "request_not_found"
    assert router.client.get(f"/admin/requests/{'x' * 600}").status_code == 400


def test_a_node_that_drains_gets_nothing_until_that_is_undone(
    router: RouterInThread, nodes: list[StandInNode], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--url", router.url, "--api-key", "sk-admin"]
    assert main(["drain", "n0", "--wait-s", str(PATIENCE_S), *flags]) == 0
    assert capsys.readouterr().out.startswith("n0 (unified) is draining; ")
    before = len(nodes[0].submits)
    for _ in range(4):
        assert router.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
    assert len(nodes[0].submits) == before
    assert {n["node_id"]: n["state"] for n in router.client.get("/status").json()["nodes"]}["n0"] == "draining"
    assert "no prefill node and no decode node" in router.client.post("/admin/drain", json={"node": "n1"}).text
    assert main(["drain", "n1", "--undo", "--json", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "serving"
    assert main(["role", "n1", "prefill", *flags]) == 2
    assert "--placement elastic" in capsys.readouterr().err
    assert main(["role", "n1", "foo", *flags]) == 2
    assert "tandem role NODE prefill|decode|unified; 'foo' is no role" in capsys.readouterr().err
    assert main(["drain", *flags]) == main(["drain", "n9", *flags]) == 2
    assert "n0, n1" in capsys.readouterr().err


def test_a_node_that_does_not_drain_is_named(
    router: RouterInThread, nodes: list[StandInNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.router.http.admin.operate.ANSWER_S", 0.2)
    nodes[0].deaf_to_drain = True
    answer = router.client.post("/admin/drain", json={"node": "n0"})
    assert (answer.status_code, "n0 does not say so" in answer.text) == (503, True)


def test_each_process_counts_the_requests_of_all(
    workers: list[RouterInThread],
    router: RouterInThread,
    nodes: list[StandInNode],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.router.watching.exchange.ANSWER_S", PATIENCE_S)
    body = {"prompt": "some words", "max_tokens": 3, "ignore_eos": True}

    def counted(worker: RouterInThread) -> dict[str, int]:
        counts: dict[str, int] = worker.client.get("/status").json()["requests"]
        return counts

    with ThreadPoolExecutor() as pool:
        try:
            for node in nodes:
                node.hold_tokens = True
            asked = (workers[0], workers[1], workers[1])
            answers = [pool.submit(worker.client.post, "/v1/completions", json=body) for worker in asked]
            for worker in workers:
                wait_until(lambda w=worker: counted(w) == {"active": 3, "waiting_for_node": 0}, "both to count all")
            assert main(["status", "--url", router.url, "--api-key", "sk-admin"]) == 0
            assert "\n3 requests under way, 0 of them without a node\n" in capsys.readouterr().out
        finally:
            for node in nodes:
                node.hold_tokens = False
        assert [answer.result().status_code for answer in answers] == [200] * 3
    for worker in workers:
        wait_until(lambda w=worker: not counted(w)["active"], "the ends")


def test_each_process_tells_of_the_requests_of_all(
    workers: list[RouterInThread],
    router: RouterInThread,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("exchange.ANSWER_S", "desk.STORY_S"):  # nobody is left out for being slow
        monkeypatch.setattr(f"tandem.router.watching.{limit}", PATIENCE_S)
    for index, worker in enumerate(workers):
        headers = {"X-Request-Id": f"mine-{index}", "X-TTFT-Target-Ms": "60000"}
        body = {"prompt": ["some words", "others"], "max_tokens": 3, "request_id": f"own-{index}", "ignore_eos": True}
        assert worker.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    for worker in workers:
        recent = worker.client.get("/admin/requests").json()["recent"]
        assert {name for each in recent for name in each["names"]} >= {"mine-0", "mine-1"}
        for name in ("mine-0", "mine-1", "own-0", "cmpl-own-1"):
            prompts = worker.client.get(f"/admin/requests/{name}").json()["prompts"]
            assert [prompt["state"] for prompt in prompts] == ["finished"] * 2
            for prompt in prompts:
                assert (prompt["output_tokens"], prompt["kept"], prompt["silent_nodes"]) == (3, True, [])
                kinds = [moment["kind"] for moment in prompt["moments"]]
                assert {"queue", "accepted", "first_token", "tokens", "end"} <= set(kinds)
                (chunk,) = (moment for moment in prompt["moments"] if moment["kind"] == "chunk")
                assert (chunk["where"], chunk["tokens"], chunk["lasts_s"]) == (prompt["nodes"][0], 7, 0.0005)
    flags = ["--url", router.url, "--api-key", "sk-admin"]
    picture = tmp_path / "story.svg"
    assert main(["trace", "mine-1", "--picture", str(picture), *flags]) == 0
    words = [text.text for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("computes 7 tokens of the prompt") == 2
    assert "computes 7 tokens of the prompt" in capsys.readouterr().out
    assert main(["trace", "--picture", str(picture), *flags]) == 2, "a picture of which?"
    assert main(["trace", *flags]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 4
    assert main(["trace", "mine-0", "--json", *flags]) == 0
    assert len(json.loads(capsys.readouterr().out)["prompts"]) == 2
    assert main(["trace", "nobody", *flags]) == 2
    assert "X-Request-Id" in capsys.readouterr().err
    metrics = router.client.get("/metrics").text
    assert 'tandem_router_prompts_by_promise_total{promise="kept"} 2.0' in metrics


def test_a_process_that_is_gone_is_left_out(
    folder: Path, nodes: list[StandInNode], tmp_path: Path, workers: list[RouterInThread]
) -> None:
    seat = make_seats(tmp_path / "placements", 2)[1]
    (tmp_path / "asked-1").touch()  # what its predecessor left
    with RouterInThread(folder, (nodes[0].address,), seat=seat, timeouts=FAST) as alone:
        assert alone.wait_ready().client.get("/admin/requests").json()["recent"] == []
