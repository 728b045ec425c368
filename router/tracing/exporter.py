"""Sends a trace of each request to a collector by OTLP over HTTP; the one place that knows OpenTelemetry's packages."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.process.version import version
from tandem.engine.process.watched import log_only, watched_task, watched_thread
from tandem.router.recent.story import RequestStory
from tandem.router.requests.request_log import HttpExchange
from tandem.router.tracing.node_parts import node_parts, stage_of

logger = logging.getLogger(__name__)

FLUSH_S = 5.0  # a guess: how long the end of a router may wait for its collector
MOST_PENDING = 256  # traces whose nodes have not answered yet; a guess. What comes beyond has the router's part alone
Tell = Callable[[RequestStory], Awaitable[dict[str, Any]]]
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion", "/v1/responses": "chat"}


def checked_endpoint(endpoint: str) -> str:
    """The URL that traces are posted to. Raises ConfigError for one that is none, and without OpenTelemetry."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: give a URL for OTLP over HTTP, http://collector:4318/v1/traces"
        )
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'tandem-serve[otel]'")
    return endpoint if url.path.strip("/") else urlunsplit(url._replace(path="/v1/traces"))


class _NanoSeconds:
    """Converts monotonic seconds to Unix time in ns, as clocks stand at one moment."""

    def __init__(self, now: float) -> None:
        self._zero = time.time_ns() - round(now * 1e9)

    def __call__(self, at: float) -> int:
        return self._zero + round(at * 1e9)


class RequestTraces:
    """One router process's traces. OpenTelemetry's own variables (OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS, …) hold."""

    def __init__(self, endpoint: str, router_id: str, tell: Tell) -> None:
        """Raises ConfigError as `checked_endpoint` does. Starts a thread that sends. `tell` has nodes tell what
        they did for a prompt."""
        url = checked_endpoint(endpoint)
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        about = {"service.instance.id": router_id, "service.version": version()}
        if not os.environ.get("OTEL_SERVICE_NAME"):
            about["service.name"] = "tandem-router"
        self._otel = trace
        self._read_context = TraceContextTextMapPropagator().extract
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        self._tracer = self._provider.get_tracer("tandem", version())
        self._tell, self._pending = tell, set[asyncio.Task[None]]()

    def write(self, exchange: HttpExchange, status: int) -> None:
        """Sends the trace of an exchange that has ended now: a span for it, under its client's if it named one, one for
        each stage of each prompt, and under these what nodes did, as soon as they have told."""
        now, otel, said = time.monotonic(), self._otel, exchange.said
        ns = _NanoSeconds(now)
        context = self._read_context({"traceparent": said.traceparent, "tracestate": said.tracestate})
        name = f"{OPERATIONS.get(exchange.path, exchange.path)} {exchange.model}".rstrip()
        root = self._tracer.start_span(
            name, context, otel.SpanKind.SERVER, self._attributes(exchange, status), start_time=ns(exchange.started_at)
        )
        if status >= 500:
            root.set_status(otel.StatusCode.ERROR, exchange.error)
        root.end(ns(now))
        if not root.get_span_context().trace_flags.sampled:
            return  # and no node is asked
        if len(self._pending) >= MOST_PENDING:
            exchange.stories.clear()
        task = watched_task(self._write_stages(otel.set_span_in_context(root), exchange, ns), "trace", log_only)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _write_stages(self, inside: Any, exchange: HttpExchange, ns: _NanoSeconds) -> None:
        told = await asyncio.gather(*map(self._tell, exchange.stories))
        parts = [list(node_parts(*each)) for each in zip(told, (s.started_at for s in exchange.stories), strict=True)]
        for index, stages in enumerate(exchange.stages):
            spans = [
                self._tracer.start_span(stage.name, inside, attributes=stage.attributes, start_time=ns(stage.begin))
                for stage in stages
            ]
            for part in parts[index] if parts else ():
                span = spans[stage_of(part, stages)]
                if part.begin == part.end:
                    span.add_event(part.name, part.attributes, ns(part.begin))
                    continue
                of_stage = self._otel.set_span_in_context(span)
                own = self._tracer.start_span(
                    part.name, of_stage, attributes=part.attributes, start_time=ns(part.begin)
                )
                own.end(ns(part.end))
            for stage, span in zip(stages, spans, strict=True):
                span.end(ns(max(stage.begin, stage.end)))

    async def settle(self) -> None:
        """Waits for nodes that were asked, which takes as long as they have to answer."""
        await asyncio.gather(*self._pending)

    @staticmethod
    def _attributes(exchange: HttpExchange, status: int) -> dict[str, Any]:
        """GenAI's and HTTP's semantic conventions, whose names are in development: written here, since their package
        keeps them private."""
        figures = exchange.figures
        found = {
            "gen_ai.operation.name": OPERATIONS.get(exchange.path),
            "gen_ai.provider.name": "tandem",
            "gen_ai.request.model": exchange.model,
            "gen_ai.response.model": exchange.model,
            "gen_ai.response.id": exchange.completion_id,
            "gen_ai.response.finish_reasons": figures.get("finish"),
            "gen_ai.response.time_to_first_chunk": figures.get("ttft_s"),
            "gen_ai.usage.input_tokens": figures.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": figures.get("output_tokens"),
            "gen_ai.usage.cache_read.input_tokens": figures.get("cached_tokens"),
            "http.request.method": "POST",
            "http.response.status_code": status,
            "url.path": exchange.path,
            "error.type": exchange.error,
            "tandem.request_id": exchange.said.request_id,
            "tandem.nodes": figures.get("nodes"),
            "tandem.attempts": figures.get("attempts"),
        }
        return {name: value for name, value in found.items() if value not in (None, "", [])}

    def close(self) -> None:
        """Sends what has not been sent, for at most FLUSH_S. To be called off the event loop."""
        thread = watched_thread(self._provider.shutdown, "tandem-traces", on_failure=log_only)
        thread.start()
        thread.join(FLUSH_S)
        if thread.is_alive():
            logger.warning("the collector of traces did not take all within %g s; the rest is lost", FLUSH_S)
