"""Explains why requests go where they go: by a header of each answer, and by `POST /explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from tandem.router.access.gate import Gate
from tandem.router.http.http_io import read_body
from tandem.router.placing.elastic import Plan
from tandem.router.placing.placement import PlacementRequest
from tandem.router.placing.policies import Choice
from tandem.router.requests.generation import Generation
from tandem.router.requests.service import CompletionService

PLACEMENT_HEADER = b"x-tandem-placement"
MOST_PLACEMENTS = 8  # a guess: Python's clients take 100 headers of an answer, nginx 4 KiB of them


def placement_headers(generations: Sequence[Generation]) -> list[tuple[bytes, bytes]]:
    """One header for each prompt, which says where its first attempt went and why; of many prompts one for each of the
    first, and a last one that says how many more there are."""
    placed = [generation.placement for generation in generations if generation.placement is not None]
    told = [placement.explanation() for placement in placed[:MOST_PLACEMENTS]]
    if len(placed) > len(told):
        told.append(f"and {len(placed) - len(told)} more prompts")
    return [(PLACEMENT_HEADER, text.encode("ascii", "replace")) for text in told]


def add_explain_route(app: FastAPI, service: CompletionService, gate: Gate, limit: int) -> None:
    """Adds `POST /explain`, which takes a body of /v1/completions and answers what each node would cost now, and what
    the elastic rule would choose from. Nothing is placed or sent. `limit`: the most bytes of a body."""

    @app.post("/explain")
    async def explain(request: Request) -> Response:
        tenant = gate.check_admin(request.headers.raw, "POST /explain").tenant
        body, plans = await service.plan(await read_body(request.scope, request.receive, limit), tenant)
        prompts = []
        for plan in plans:
            mark = b"" if plan.adapter is None else plan.adapter.mark
            wanted = PlacementRequest(len(plan.token_ids), plan.sampling.max_tokens, body.num_generated, adapter=mark)
            found = service.offers(wanted, plan)
            elastic = [_shown_plan(each) for each in service.plans(wanted, plan)]
            nodes = [_shown(choice) for choice in found]
            prompts.append({"num_prompt_tokens": len(plan.token_ids), "nodes": nodes, "plans": elastic})
        answer = {"placement": service.options.placement, "prompts": prompts}
        return Response(msgspec.json.encode(answer), media_type="application/json")


def _shown_plan(plan: Plan) -> dict[str, Any]:
    return {
        "computes": plan.computing[0].node_id,
        "helped_by": " ".join(key.node_id for key in plan.computing[1:]),
        "decodes": plan.decoding.node_id,
        "pulls_from": "" if plan.peer is None else plan.peer.node_id,
        "cost_s": round(plan.cost_s, 6),
        "first_token_s": round(plan.own_s, 6),
        "due_s": round(plan.due_s, 6),
        "num_late": plan.num_late,
    }


def _shown(choice: Choice) -> dict[str, Any]:
    info = choice.node.info
    return {
        "node_id": info.node_id,
        "role": info.role,
        "leaning": choice.node.leaning,
        "leaning_why": choice.node.status.leaning.why,
        "part": choice.kind,
        "cost_s": round(choice.cost_s, 6),
        "queue_s": round(choice.queue_s, 6),
        "compute_s": round(choice.compute_s, 6),
        "transfer_s": round(choice.transfer_s, 6),
        "sequences_s": round(choice.sequences_s, 6),
        "duplicate_s": round(choice.duplicate_s, 6),
        "crowding_s": round(choice.crowding_s, 6),
        "adapter_s": round(choice.adapter_s, 6),
        "num_cached_tokens": choice.num_cached_tokens,
        "num_fetched_tokens": choice.num_fetched_tokens,
        "fetched_from": choice.holder,
        "no_room": choice.no_room,
    }
