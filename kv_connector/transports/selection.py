"""Chooses the transport of a pair of nodes. Both sides see the same two NodeInfos, so both find the same answer.

A node exports only the transports that its configuration and device allow; what both export and what their places
(process, host) allow is a candidate, the first in `ORDER` is used.
"""

from __future__ import annotations

import torch

from tandem.engine.contracts.errors import TransportError
from tandem.engine.contracts.wire.parts import NodeInfo

ORDER = ("local", "shm", "cuda_ipc", "nixl", "ucx", "tcp")
FOR_RANKS = ("cuda_ipc", "tcp")  # for nodes whose ranks have a GPU pool each
ONLY_WHEN_ASKED = ("ucx",)  # `auto` does not offer it: it is better than tcp only over a UCX build with RDMA


def candidates(ours: NodeInfo, theirs: NodeInfo) -> tuple[list[str], dict[str, str]]:
    """Returns the transports that the two nodes can use, best first, and the reason against each of the others."""
    usable, reasons = [], {}
    for name in ORDER:
        reason = _why_not(name, ours, theirs)
        if reason:
            reasons[name] = reason
        else:
            usable.append(name)
    return usable, reasons


def choose_transport(ours: NodeInfo, theirs: NodeInfo, requested: str, device: torch.device) -> str:
    """The transport between two nodes; `requested` is "auto" or a name. Raises TransportError that says why not."""
    usable, reasons = candidates(ours, theirs)
    if requested == "auto" and usable:
        return usable[0]
    if requested in usable:
        return requested
    if requested != "auto" and requested not in ORDER:
        raise TransportError(f"there is no transport {requested!r}: choose auto, {', '.join(ORDER)}")
    wanted = {requested: reasons[requested]} if requested != "auto" else reasons
    why = "; ".join(f"{name}: {reason}" for name, reason in wanted.items())
    remedy = "give both --transport auto, or the same one that reaches from one to the other"
    raise TransportError(f"no way to move KV from {device} of {ours.node_id} to {theirs.node_id} ({why}); {remedy}")


def _why_not(name: str, ours: NodeInfo, theirs: NodeInfo) -> str:
    """The reason why the two nodes can't use transport `name`; "" if they can."""
    for info in (ours, theirs):
        if name not in info.transports:
            return f"{info.node_id} does not offer it (its configuration or its device rules it out)"
    same_host = bool(ours.host_id) and ours.host_id == theirs.host_id
    if name in ("local", "shm", "cuda_ipc") and not same_host:
        return "the nodes are not on one host in one pid namespace"
    if name == "local" and ours.pid != theirs.pid:
        return "the nodes are not in one process"
    return ""
