"""`/profile/start` and `/profile/stop`: who may, what is refused, and what becomes of nodes that don't answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread
from waiting import wait_until

from stand_in_node import StandInNode, stand_in_nodes
from tandem.router.http.admin import profile

KEYS = """
keys:
  user: {scopes: [inference]}
  boss: {scopes: [inference, admin]}
"""


@pytest.fixture
def nodes() -> Iterator[list[StandInNode]]:
    with stand_in_nodes(2, VOCAB_SIZE) as found:
        yield found


@pytest.fixture
def router(folder: Path, nodes: list[StandInNode], tmp_path: Path) -> Iterator[RouterInThread]:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    with RouterInThread(folder, tuple(node.address for node in nodes), api_keys_file=str(keys)) as router:
        wait_until(lambda: len(router.worker.service.cluster.serving()) == 2, "two nodes")
        yield router


def ask(router: RouterInThread, path: str, key: str = "boss", **body: object) -> tuple[int, dict]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = router.client.post(f"/profile/{path}", json=body, headers=headers)
    return answer.status_code, answer.json()


def test_admins_may_and_the_audit_log_says_who(router: RouterInThread, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tandem")
    for path in ("start", "stop"):
        assert ask(router, path, "user")[0] == 403
        status, answer = ask(router, path)
        assert status == 200
        assert sorted((node["node_id"], node["error"]) for node in answer["nodes"]) == [("n0", None), ("n1", None)]
    said = [record.getMessage() for record in caplog.records if record.name == "tandem.audit"]
    assert [line.partition(":")[0] for line in said] == ["POST /profile/start"] * 2 + ["POST /profile/stop"] * 2


@pytest.mark.parametrize(
    ("body", "param"), [({"seconds": 0}, "seconds"), ({"steps": 10**6}, "steps"), ({"secondes": 5}, "secondes")]
)
def test_what_is_out_of_bounds_is_refused(router: RouterInThread, body: dict, param: str) -> None:
    status, answer = ask(router, "start", **body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_who_does_not_answer_or_goes_is_named(
    router: RouterInThread, nodes: list[StandInNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "START_S", 3.0)
    nodes[1].deaf_to_profiles = True
    errors = {node["node_id"]: node["error"] for node in ask(router, "start")[1]["nodes"]}
    assert errors == {"n0": None, "n1": "no answer within 3 s"}
    awaited = router.worker.service.cluster.profiles
    assert not awaited._awaited, "nobody waits any more"
    nodes[1].die()
    errors = {node["node_id"]: node["error"] for node in ask(router, "stop")[1]["nodes"]}
    assert errors.get("n1", "is lost").find("is lost") >= 0
    assert errors["n0"] is None
    assert not awaited._awaited
