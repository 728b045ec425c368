"""Finds nodes for a sub-request that waits."""

from __future__ import annotations

from tandem.router.nodes.cluster import Cluster
from tandem.router.placing.placement import Placement, PlacementRequest
from tandem.router.requests.machine import RequestMachine


def find_nodes(cluster: Cluster, machine: RequestMachine, request_id: str, now: float) -> Placement | None:
    """Places the next attempt of a sub-request: its prompt and what it has emitted. None: no node takes it now."""
    if not any(view.usable for view in cluster.serving()):
        return None
    attempt, prompt, spec = machine.attempts.live[request_id], machine.prompt_of(request_id), machine.spec
    hashes = cluster.model.hash_prompt(prompt, spec.secrecy)
    num_done = len(prompt) - len(spec.prompt_token_ids)
    request = PlacementRequest(
        num_prompt_tokens=len(prompt),
        max_tokens=spec.sampling.max_tokens - num_done,
        num_samples=max(len(attempt.sample_indices), machine.spec.sampling.beam_width),
        prompt_logprobs=machine.wants_prompt_logprobs(),
        avoid=frozenset(attempt.avoid),
        session=spec.session,
        is_precise=attempt.is_precise,
        targets=spec.targets,
        adapter=b"" if spec.adapter is None else spec.adapter.mark,
        waited_s=0.0 if num_done else max(0.0, spec.deadline_s - (machine.deadline - now)),
    )
    placement = cluster.place(request, hashes if spec.use_prefix_cache else [], now)
    for choice in () if placement is None else placement.choices:
        choice.node.note_adapter(request.adapter)
    return placement
