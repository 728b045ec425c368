"""Finds nodes for a sub-request that waits."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.contracts.keys import NodeKey
from tandem.router.nodes.cluster import Cluster
from tandem.router.placing.forerunners import QUEUE_SHARE
from tandem.router.placing.placement import Placement, PlacementRequest
from tandem.router.requests.actions import RequestSpec
from tandem.router.requests.machine import RequestMachine

LOOK_AGAIN_S = 0.05  # whether a prompt that waits for another still should: with the next tick


def find_nodes(cluster: Cluster, machine: RequestMachine, request_id: str, now: float) -> Placement | None:
    """Places the next attempt of a sub-request: its prompt and what it has emitted. None: no node takes it now, or it
    had better wait for another prompt."""
    if not any(view.usable for view in cluster.serving()):
        return None
    attempt, prompt, spec = machine.attempts.live[request_id], machine.prompt_of(request_id), machine.spec
    hashes: Sequence[bytes] = cluster.model.hash_prompt(prompt, spec.secrecy) if spec.use_prefix_cache else []
    num_done = len(prompt) - len(spec.prompt_token_ids)
    request = PlacementRequest(
        num_prompt_tokens=len(prompt),
        max_tokens=spec.sampling.max_tokens - num_done,
        num_samples=max(len(attempt.sample_indices), machine.spec.sampling.beam_width),
        prompt_logprobs=machine.wants_prompt_logprobs(),
        avoid=frozenset(attempt.avoid),
        session=spec.session,
        is_precise=attempt.is_precise,
        goes_alone=attempt.goes_alone,
        targets=spec.targets,
        adapter=b"" if spec.adapter is None else spec.adapter.mark,
        waited_s=0.0 if num_done else max(0.0, spec.deadline_s - (machine.deadline - now)),
    )
    if not num_done and _should_wait(cluster, spec, hashes, request.waited_s, now):
        attempt.not_before = now + LOOK_AGAIN_S
        return None
    placement = cluster.place(request, hashes, now)
    for choice in () if placement is None else placement.choices:
        choice.node.note_adapter(request.adapter)
    if placement is not None and not num_done:
        _note_forerunner(cluster, spec, hashes, placement, now)
    return placement


def _should_wait(cluster: Cluster, spec: RequestSpec, hashes: Sequence[bytes], waited_s: float, now: float) -> bool:
    def cached() -> dict[NodeKey, int]:
        return cluster.tokens_held(hashes)

    return cluster.forerunners.should_wait(spec.request_id, hashes, cached, waited_s, QUEUE_SHARE * spec.queue_s, now)


def _note_forerunner(
    cluster: Cluster, spec: RequestSpec, hashes: Sequence[bytes], placement: Placement, now: float
) -> None:
    """Has others wait for this prompt, if it is foreseen when it will be computed, and routers will hear of it."""
    plan, node, identity = placement.plan, placement.choices[-1].node.outlook, cluster.model.identity
    if plan is not None and node is not None and identity is not None and cluster.has_directory:
        size, first_token_at = identity.hash_block_size, now + plan.own_s
        cluster.forerunners.placed(spec.request_id, hashes, size, node, first_token_at)
