"""What clients and people see of placement: the session header, the header that tells, `/explain`, `tandem explain`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread
from waiting import wait_until

from stand_in_node import StandInNode, stand_in_nodes
from tandem.deploy.bench.sse_client import HttpError, post_json
from tandem.deploy.cli import main
from tandem.router.text.request_headers import read_headers


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[StandInNode]]:
    with stand_in_nodes(3, VOCAB_SIZE) as found:
        yield found


@pytest.fixture(scope="module")
def router(folder: Path, nodes: list[StandInNode]) -> Iterator[RouterInThread]:
    with RouterInThread(folder, tuple(node.address for node in nodes), placement="round_robin") as router:
        router.wait_ready()
        wait_until(lambda: len(router.worker.service.cluster.serving()) == 3, "three nodes")
        yield router


def placed_at(router: RouterInThread, stream: bool = False, **headers: str) -> str:
    body = {"prompt": "the fox", "max_tokens": 2, "stream": stream}
    response = router.client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    told = response.headers["x-tandem-placement"]
    assert told.startswith("unified node; all=")
    return told.split("all=")[1]


# README says: "say why one went where"
def test_the_header_names_the_node_and_the_policy(router: RouterInThread) -> None:
    told = [placed_at(router, stream) for stream in (False, True, False)]
    assert sorted(text.split()[0] for text in told) == ["n0", "n1", "n2"]
    assert all("by=round_robin of=3" in text for text in told)


# README says: "`X-Session-Id` pins a conversation"
def test_a_session_has_one_home(router: RouterInThread) -> None:
    told = [placed_at(router, **{"X-Session-Id": "alice"}) for _ in range(4)]
    assert len({text.split()[0] for text in told}) == 1
    assert all("by=session" in text for text in told)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_may_keep_it_to_themselves(folder: Path, node: StandInNode, stream: bool) -> None:
    with RouterInThread(folder, (node.address,), placement_header=False) as router:
        router.wait_ready()
        answer = router.client.post("/v1/completions", json={"prompt": "a fox", "max_tokens": 1, "stream": stream})
        assert answer.status_code == 200
        assert "x-tandem-placement" not in answer.headers


def test_a_prompt_of_two_has_two_headers(router: RouterInThread) -> None:
    response = router.client.post("/v1/completions", json={"prompt": ["a fox", "a dog"], "max_tokens": 1})
    assert len(response.headers.get_list("x-tandem-placement")) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_many_prompts_have_no_more_headers_than_clients_take(router: RouterInThread, stream: bool) -> None:
    body = {"prompt": ["a fox"] * 120, "max_tokens": 1, "stream": stream}
    response = router.client.post("/v1/completions", json=body)
    *told, rest = response.headers.get_list("x-tandem-placement")
    assert len(told) == 8
    assert all("by=round_robin" in text for text in told)
    assert rest == "and 112 more prompts"


def test_explain_places_nothing(router: RouterInThread, nodes: list[StandInNode]) -> None:
    before = sum(len(node.submits) for node in nodes)
    answer = router.client.post("/explain", json={"prompt": "the quick brown fox", "max_tokens": 4}).json()
    assert answer["placement"] == "round_robin"
    (prompt,) = answer["prompts"]
    assert sorted(node["node_id"] for node in prompt["nodes"]) == ["n0", "n1", "n2"]
    prices = [node["cost_s"] for node in prompt["nodes"]]
    assert prices == sorted(prices)
    assert all(node["cost_s"] >= node["compute_s"] > 0 for node in prompt["nodes"])
    assert sum(len(node.submits) for node in nodes) == before


def test_the_command_prints_a_row_a_node(router: RouterInThread, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "the quick brown fox", "--url", router.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line.split()[0] for line in lines[1:]) == ["n0", "n1", "n2", "node"]
    assert main(["explain", "--url", router.url]) == 2
    assert "give a PROMPT" in capsys.readouterr().err


def test_explain_refuses_what_completions_refuse(router: RouterInThread) -> None:
    with pytest.raises(HttpError, match="400"):
        asyncio.run(post_json(router.url, "/explain", {"prompt": []}))


def test_long_session_names_are_cut() -> None:
    assert read_headers([(b"x-session-id", b"x" * 1000)]).session == "x" * 256
    assert read_headers([(b"host", b"h")]).session == ""
