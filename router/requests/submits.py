"""What nodes are told about an attempt. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import Migrate, Submit
from tandem.router.placing.placement import Placement
from tandem.router.requests.actions import Action, RequestSpec, SendToNode
from tandem.router.requests.moves import Move
from tandem.router.requests.parts import Attempt


def continued_prompt(spec: RequestSpec, seen: Sequence[int]) -> npt.NDArray[np.int32]:
    """The client's prompt, then the output tokens `seen`; int32, [num_tokens]."""
    if not seen:
        return spec.prompt_token_ids
    return np.concatenate([spec.prompt_token_ids, np.array(seen, dtype=np.int32)])


def submit(
    spec: RequestSpec, attempt: Attempt, seen: Sequence[int], prompt_logprobs: bool, deadline_s: float
) -> Submit:
    """A Submit for a node that does the whole attempt. `prompt_logprobs`: they were asked for and are still missing."""
    sampling = spec.sampling
    if not prompt_logprobs:
        sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
    return Submit(
        request_id=attempt.request_id,
        attempt=attempt.number,
        mode="full",
        prompt_token_ids=continued_prompt(spec, seen).astype("<i4", copy=False).tobytes(),
        num_prior_output_tokens=len(seen),
        sample_indices=attempt.sample_indices,
        sampling=sampling,
        priority=spec.priority,
        targets=spec.targets,
        # A client that has tokens already waits for the next one since the attempt before was lost.
        waited_s=0.0 if seen else max(0.0, spec.deadline_s - deadline_s),
        deadline_s=max(0.001, deadline_s),
        use_prefix_cache=spec.use_prefix_cache,
        pair_start=spec.pair_start,
        salt=spec.secrecy.salt,
        num_public_tokens=spec.secrecy.num_public_tokens,
        context=spec.secrecy.context,
        is_precise=attempt.is_precise,
        cache_share=spec.cache_share,
        adapter=spec.adapter,
        media=spec.media,
    )


def to_placed(base: Submit, attempt: Attempt, placement: Placement) -> list[Action]:
    """Sends `base` to the nodes that `attempt` was placed on; each learns of the other."""
    assert attempt.primary is not None
    computes = msgspec.structs.replace(base, prefix=placement.prefix) if placement.prefix is not None else base
    if placement.helpers and not (base.media or base.adapter):
        computes = msgspec.structs.replace(computes, helpers=placement.helpers)
    if placement.prefill is None:
        return [SendToNode(attempt.primary, computes)]
    assert attempt.prefill is not None
    decode = msgspec.structs.replace(base, mode="decode", peer=placement.prefill)
    prefill = msgspec.structs.replace(computes, mode="prefill", peer=placement.primary)
    return [SendToNode(attempt.primary, decode), SendToNode(attempt.prefill, prefill)]


def to_moving(
    base: Submit, move: Move, num_tokens: int, source: PeerRef, target: PeerRef, within_s: float
) -> list[Action]:
    """Sends the successor's `base` to `target`, and the order to hand the sample over to `source`. `num_tokens` counts
    prompt and output so far."""
    old, new = move.source, move.successor
    assert old.primary is not None
    assert new.primary is not None
    order = Migrate(
        request_id=old.request_id,
        attempt=old.number,
        sample_index=new.sample_indices[0],
        peer=target,
        successor=new.key,
        num_tokens=num_tokens,
        deadline_s=within_s / 2,  # the old node ends it by itself before this router does
    )
    return [
        SendToNode(new.primary, msgspec.structs.replace(base, mode="decode", peer=source, is_running=True)),
        SendToNode(old.primary, order),
    ]
