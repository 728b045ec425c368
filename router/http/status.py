"""`GET /status`: what a cluster's nodes have to do, for operators; `tandem status` shows it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response

from tandem.engine.process.version import version
from tandem.router.access.gate import Gate
from tandem.router.http.model_routes import READ, json_answer
from tandem.router.placing.view import NodeView
from tandem.router.requests.service import CompletionService
from tandem.router.watching.desk import RequestDesk

TIERS = ("host_blocks", "host_capacity", "disk_blocks", "disk_capacity")


def add_status_route(app: FastAPI, service: CompletionService, gate: Gate, desk: RequestDesk) -> None:
    """Adds `GET /status`. Figures of nodes are those of their last heartbeats to the process that answers; requests are
    those of all processes of this router."""

    @app.api_route("/status", methods=READ)
    async def status(request: Request) -> Response:
        gate.check_admin(request.headers.raw, "GET /status")
        cluster, facts = service.cluster, service.cluster.model.facts
        answer = {
            "version": version(),
            "ready": cluster.ready,
            "missing": None if cluster.ready else cluster.missing(),
            "model": None if facts is None else facts.name,
            "task": None if facts is None else facts.task,
            "max_model_len": None if facts is None else facts.max_input_len,
            # As /metrics has them: work that can't be in time, and what nodes have left beside what is promised.
            "fleet": {name: round(value, 3) for name, value in cluster.need.figures().items()},
            "requests": await desk.counts(),
            "unused": cluster.unused(),
            "nodes": [_shown(view) for view in sorted(cluster.views, key=lambda view: (view.role, view.info.node_id))],
        }
        return json_answer(answer)


def _shown(view: NodeView) -> dict[str, Any]:
    said, info = view.status, view.info
    counters = said.counters
    state = "draining" if view.draining else "silent" if view.silent else "serving"
    return {
        "node_id": info.node_id,
        "role": info.role,
        "leaning": view.leaning,
        "leaning_why": said.leaning.why,
        "address": info.control_address,
        "version": info.version,
        "state": state,
        "running": said.num_running,
        "waiting": said.num_waiting,
        "waiting_tokens": said.num_waiting_tokens,
        "kv_tokens": said.num_blocks * said.block_size,
        "kv_used": round(1 - said.num_free_blocks / said.num_blocks, 4) if said.num_blocks else None,
        "tiers": {name: counters[name] for name in TIERS if name in counters},
        "prompt_tokens": counters.get("prompt_tokens", 0.0),
        "cached_tokens": counters.get("cached_tokens", 0.0),
        "preemptions": counters.get("preemptions", 0.0),
        "prefill_tokens_per_s": round(1 / said.prefill_s_per_token) if said.prefill_s_per_token else None,
    }
