"""`tandem scale` against the one endpoint of Kubernetes that it uses, as its documentation describes it: a stand-in."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from documented import blocks
from kubernetes_api import TOKEN, KubernetesApi

from tandem.deploy.cli import main
from tandem.deploy.scale.command import ask_routers
from tandem.deploy.scale.kubernetes import Deployments


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with KubernetesApi({"tandem-prefill": 1, "tandem-decode": 0}).answering() as api:
        yield api


def scale(api: KubernetesApi, token: Path, *flags: str) -> int:
    pools = [f"--pool={role}=tandem-{role}:0:4" for role in ("prefill", "decode")]
    where = ["--url", api.url, "--api-server", api.url, "--namespace", "llm", "--token-file", str(token)]
    return main(["scale", *where, *pools, "--idle-s", "0", "--once", *flags])


def test_deployments_get_the_sizes_that_are_asked_for(
    api: KubernetesApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    api.metrics.waiting.set(2)
    assert scale(api, token, "--dry-run") == 0
    assert "decode: 0 -> 1, if this were no dry run" in capsys.readouterr().err
    assert api.replicas == {"tandem-prefill": 1, "tandem-decode": 0}
    assert scale(api, token) == 0
    assert api.replicas == {"tandem-prefill": 1, "tandem-decode": 1}
    assert ("PATCH", f"Bearer {TOKEN}", "application/merge-patch+json") in api.headers
    api.metrics.waiting.set(0)
    assert scale(api, token) == 0
    assert api.replicas == {"tandem-prefill": 0, "tandem-decode": 0}, "nothing to do anywhere"


def test_what_the_page_says_to_type_is_what_works(
    api: KubernetesApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    (line,) = (line for line in blocks("sh", "docs/scaling.md")[1].lines if line.startswith("tandem scale "))
    here = re.sub(r"http://(router:8000|127\.0\.0\.1:8001)", api.url, line)
    assert here.count(api.url) == 2
    assert main([*shlex.split(here)[1:], "--token-file", str(token), "--once"]) == 0
    assert capsys.readouterr().err.endswith("decode: 0 -> 1\n")
    assert api.replicas == {"tandem-prefill": 1, "tandem-decode": 1}, "the least that it names"


def test_who_may_not_or_does_not_answer_changes_nothing(
    api: KubernetesApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(api, tmp_path / "none") == 1
    assert "403" in capsys.readouterr().err
    assert main(["scale", "--url", "http://127.0.0.1:1", "--api-server", api.url, "--namespace", "llm", "--once",
                 "--pool", "decode=tandem-decode:1:2"]) == 1  # fmt: skip
    assert "nothing is changed" in capsys.readouterr().err
    with pytest.raises(OSError, match="404"):
        Deployments({"decode": "other"}, "llm", api.url).sizes()


def test_each_router_behind_a_name_is_asked_and_one_that_is_away_is_left_out(
    api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has nothing to do; the request waits at the second."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    own = socket.getaddrinfo

    def resolve(host: str, *more: object, **named: int) -> list[object]:
        hosts = ["127.0.0.1", "127.0.0.2", "127.0.0.3"] if host == "routers" else [host]
        return [found for each in hosts for found in own(each, *more, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with KubernetesApi({}, ("127.0.0.2", api.server_port)).answering() as second:
        second.metrics.waiting.set(1)
        url = f"http://routers:{api.server_port}/"
        assert set(ask_routers(url)) == {f"127.0.0.{number}:{api.server_port}" for number in (1, 2)}
        assert scale(api, token, "--url", url) == 0
        assert api.replicas == {"tandem-prefill": 1, "tandem-decode": 1}
    with pytest.raises(OSError, match="refused"):
        ask_routers(f"http://127.0.0.3:{api.server_port}")


@pytest.mark.parametrize("pool", ["", "decode", "decode=x:1", "decode=x:2:1", "decode=x:0:0", "router=x:1:2"])
def test_pools_that_make_no_sense_are_refused(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--once", *([f"--pool={pool}"] if pool else [])]) == 2
    said = capsys.readouterr().err
    assert "ROLE=DEPLOYMENT:LEAST:MOST" in said or "leave nothing" in said
    assert main(["scale", "--once", "--pool=decode=x:1:2"]) == 2, "which API server?"
    assert main(["scale", "--once", "--pool=decode=x:1:2", "--pool=decode=y:1:2"]) == 2
    assert "a role has one pool" in capsys.readouterr().err
