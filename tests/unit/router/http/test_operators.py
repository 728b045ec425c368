"""What operators see: a line for each request in the log, and the state of the nodes, in JSON and as a table."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread
from waiting import wait_until

from stand_in_node import StandInNode, stand_in_nodes
from tandem.deploy.cli import main
from tandem.engine.process.process_log import FORMAT, JsonFormatter

KEYS = """
keys:
  sk-user: {tenant: acme, scopes: [inference]}
  sk-admin: {scopes: [admin]}
tenants:
  acme: {ttft_target_ms: 400, tpot_target_ms: 20}
"""
USER, ADMIN = ({"Authorization": f"Bearer sk-{name}"} for name in ("user", "admin"))
PROMPT = "the quick brown\nfox"


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[StandInNode]]:
    with stand_in_nodes(2, VOCAB_SIZE) as found:
        yield found


@pytest.fixture(scope="module")
def router(
    folder: Path, nodes: list[StandInNode], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterInThread]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text(KEYS)
    options = {"api_keys_file": str(keys), "enable_log_requests": True, "log_prompt_chars": 12}
    with RouterInThread(folder, tuple(node.address for node in nodes), **options) as router:
        router.client.headers.update(USER)
        router.wait_ready()
        wait_until(lambda: len(router.worker.service.cluster.serving()) == 2, "two nodes")
        yield router


def line_of(caplog: pytest.LogCaptureFixture, **known: object) -> dict[str, Any]:
    """The fields of the line that has these, which stand in it in both formats, and never the key. Lines of requests of
    other tests may come late."""

    def lines() -> list[logging.LogRecord]:
        ours = [record for record in caplog.records if record.name == "tandem.requests"]
        return [record for record in ours if known.items() <= json.loads(JsonFormatter().format(record)).items()]

    wait_until(lambda: bool(lines()), "a line")
    [record] = lines()
    plain, said = logging.Formatter(FORMAT).format(record), json.loads(JsonFormatter().format(record))
    assert "\n" not in plain
    assert "sk-" not in plain
    assert f" duration_s={said['duration_s']}" in plain
    assert "message" not in said
    return dict(said)


def test_a_tenant_is_promised_what_its_requests_do_not_bring(router: RouterInThread, nodes: list[StandInNode]) -> None:
    for more in ({}, {"itl_max_ms": 50}):
        asked = {"prompt": PROMPT, "max_tokens": 1, **more}
        answer = router.client.post("/v1/completions", json=asked, headers={"X-TPOT-Target-Ms": "10"})
        assert answer.status_code == 200, answer.text
    targets = [submit.targets for node in nodes for submit in node.submits]
    assert sorted(map(msgspec.structs.astuple, targets)) == [(0.4, 0.01, 0.0), (0.4, 0.01, 0.05)]


def test_a_line_tells_of_a_request_that_has_ended(router: RouterInThread, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tandem.requests"):
        body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
        for number, stream in enumerate((False, True)):
            named = {"X-Request-Id": f"r-{number}"}
            answer = router.client.post("/v1/completions", json={**body, "stream": stream}, headers=named)
            assert answer.status_code == 200
            said = line_of(caplog, request_id=f"r-{number}")
            assert said["id"].startswith("cmpl-")
            assert (said["path"], said["tenant"]) == ("/v1/completions", "acme")
            assert (said["status"], said["prompts"], said["output_tokens"], said["finish"]) == (200, 1, 4, ["length"])
            assert len(said["key"]) == 12
            assert said["prompt_tokens"] > said["cached_tokens"] >= 0
            assert 0 < said["ttft_s"] <= said["duration_s"]
            assert (said["attempts"], said["texts"]) == (1, [PROMPT[:12]])
            assert set(said["nodes"]) < {"n0", "n1"}


def test_refused_requests_have_a_line_too(router: RouterInThread, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="tandem.requests"):
        router.client.post("/v1/completions", json={"prompt": []}, headers={"X-Request-Id": "bad"})
        router.client.post("/v1/completions", json={"prompt": "a"}, headers=ADMIN)
        bad, without_scope = line_of(caplog, request_id="bad"), line_of(caplog, status=403)
    assert (bad["status"], bad["error"]) == (400, "invalid_request_error")
    assert "nodes" not in bad
    assert without_scope["status"] == 403
    assert "key" not in without_scope


def test_the_state_of_the_nodes_is_for_admins(router: RouterInThread) -> None:
    assert router.client.get("/status").status_code == 403
    said = router.client.get("/status", headers=ADMIN).json()
    assert (said["ready"], said["missing"], said["model"]) == (True, None, router.worker.service.facts().name)
    assert [node["node_id"] for node in said["nodes"]] == ["n0", "n1"]
    assert {node["state"] for node in said["nodes"]} == {"serving"}
    assert said["requests"]["waiting_for_node"] == 0


def test_the_command_shows_a_row_a_node(
    router: RouterInThread, nodes: list[StandInNode], capsys: pytest.CaptureFixture[str]
) -> None:
    for url in (router.url, f"{router.url}/v1"):
        assert main(["status", url, "--api-key", "sk-admin"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].endswith(": ready")
        assert [line.split()[0] for line in lines[-3:]] == ["node", "n0", "n1"]
    assert main(["status", "--url", router.url, "--api-key", "sk-admin", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["nodes"]) == 2
    assert main(["status", router.url]) == 2
    assert "scope admin" in capsys.readouterr().err
