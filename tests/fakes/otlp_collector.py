"""A collector of traces: OTLP over HTTP, in protobuf, on a port of its own in this process."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class OtlpCollector:
    """Context manager. `hold` makes it keep its callers waiting until it is cleared."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.resources: list[dict[str, Any]] = []
        self.spans: list[Any] = []
        self.released = threading.Event()
        self.released.set()
        self.asked = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.asked.set()
                collector.released.wait(60)
                collector.take(self.path, gzip.decompress(body) if self.headers["Content-Encoding"] else body)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(plain(resource.resource.attributes))
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def __enter__(self) -> OtlpCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes by their names, as Python has them."""

    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(each) for each in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}
