"""The endpoint of Kubernetes that `tandem scale` uses, as its documentation describes it, and a router's metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tandem.router.metrics.router_metrics import RouterMetrics

PATH = "/apis/apps/v1/namespaces/llm/deployments/{}/scale"
TOKEN = "a-token"


class KubernetesApi(ThreadingHTTPServer):
    """Deployments of the namespace `llm`, and metrics, at one address."""

    def __init__(self, replicas: dict[str, int], address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.replicas = replicas
        self.metrics = RouterMetrics(list)
        self.headers: list[tuple[str, str | None, str | None]] = []
        super().__init__(address, _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @contextmanager
    def answering(self) -> Iterator[KubernetesApi]:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: KubernetesApi

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
        if name is None or self.headers["Authorization"] != f"Bearer {TOKEN}":
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
