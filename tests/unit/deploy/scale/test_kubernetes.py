"""`tandem scale` against the one endpoint of Kubernetes that it uses, as its documentation describes it: a stand-in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tandem.deploy.cli import main
from tandem.deploy.scale.kubernetes import Deployments
from tandem.router.metrics.router_metrics import RouterMetrics

PATH = "/apis/apps/v1/namespaces/llm/deployments/{}/scale"


class Api(ThreadingHTTPServer):
    """A router's metrics and two Deployments, at one address."""

    def __init__(self) -> None:
        self.replicas = {"tandem-prefill": 1, "tandem-decode": 0}
        self.metrics = RouterMetrics(list)
        self.headers: list[tuple[str, str | None, str | None]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Api

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._answer(200, self.server.metrics.exposition())
        else:
            self._scale(None)

    def do_PATCH(self) -> None:
        self._scale(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _scale(self, patch: dict[str, dict[str, int]] | None) -> None:
        self.server.headers.append((self.command, self.headers["Authorization"], self.headers["Content-Type"]))
        name = next((name for name in self.server.replicas if self.path == PATH.format(name)), None)
        if name is None or self.headers["Authorization"] != "Bearer a-token":
            self._answer(404 if name is None else 403, b"{}")
            return
        if patch is not None:
            self.server.replicas[name] = patch["spec"]["replicas"]
        replicas = self.server.replicas[name]
        spec = {"replicas": replicas} if replicas else {}  # 0 is left out, as Kubernetes does
        self._answer(200, json.dumps({"kind": "Scale", "apiVersion": "autoscaling/v1", "spec": spec}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def scale(api: Api, token: Path, *flags: str) -> int:
    pools = [f"--pool={role}=tandem-{role}:0:4" for role in ("prefill", "decode")]
    where = ["--url", api.url, "--api-server", api.url, "--namespace", "llm", "--token-file", str(token)]
    return main(["scale", *where, *pools, "--idle-s", "0", "--once", *flags])


def test_deployments_get_the_sizes_that_are_asked_for(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("a-token\n")
    api.metrics.waiting.set(2)
    assert scale(api, token, "--dry-run") == 0
    assert "decode: 0 -> 1, if this were no dry run" in capsys.readouterr().err
    assert api.replicas == {"tandem-prefill": 1, "tandem-decode": 0}
    assert scale(api, token) == 0
    assert api.replicas == {"tandem-prefill": 1, "tandem-decode": 1}
    assert ("PATCH", "Bearer a-token", "application/merge-patch+json") in api.headers
    api.metrics.waiting.set(0)
    assert scale(api, token) == 0
    assert api.replicas == {"tandem-prefill": 0, "tandem-decode": 0}, "nothing to do anywhere"


def test_who_may_not_or_does_not_answer_changes_nothing(
    api: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale(api, tmp_path / "none") == 1
    assert "403" in capsys.readouterr().err
    assert main(["scale", "--url", "http://127.0.0.1:1", "--api-server", api.url, "--namespace", "llm", "--once",
                 "--pool", "decode=tandem-decode:1:2"]) == 1  # fmt: skip
    assert "nothing is changed" in capsys.readouterr().err
    with pytest.raises(OSError, match="404"):
        Deployments({"decode": "other"}, "llm", api.url).sizes()


@pytest.mark.parametrize("pool", ["", "decode", "decode=x:1", "decode=x:2:1", "decode=x:0:0", "router=x:1:2"])
def test_pools_that_make_no_sense_are_refused(pool: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--once", *([f"--pool={pool}"] if pool else [])]) == 2
    said = capsys.readouterr().err
    assert "ROLE=DEPLOYMENT:LEAST:MOST" in said or "leave nothing" in said
    assert main(["scale", "--once", "--pool=decode=x:1:2"]) == 2, "which API server?"
