"""Whether requests can be served by the nodes that are there, and in words for people: why not. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from tandem.engine.contracts.kv_layout import ModelIdentity
from tandem.router.placing.view import NodeView

MAX_REASONS = 10  # in one answer; a guess


def missing_roles(views: Iterable[NodeView]) -> str:
    """Which kinds of nodes are needed before a request can be served; "" when none is missing."""
    roles = {view.info.role for view in views if view.usable}
    if "unified" in roles or {"prefill", "decode"} <= roles:
        return ""
    return " and ".join(f"no {role} node" for role in ("prefill", "decode") if role not in roles)


def describe(views: Iterable[NodeView], reasons: Sequence[str]) -> str:
    """The usable nodes, and why others are not."""
    roles = sorted(view.info.role for view in views if view.usable)
    left_out = [f"and {len(reasons) - MAX_REASONS} more"] if len(reasons) > MAX_REASONS else []
    return "; ".join([f"usable nodes: {', '.join(roles) or 'none'}", *reasons[:MAX_REASONS], *left_out])


def other_tokenizer(ours: str, theirs: ModelIdentity | None) -> str:
    """Why a node would take a router's token ids for others; "" where it wouldn't, or one of them doesn't say.
    `ours` is a digest."""
    if not ours or theirs is None or theirs.tokenizer in ("", ours):
        return ""
    return "it serves another model: its tokenizer.json differs from this router's; give both the same MODEL"


def difference(ours: ModelIdentity | None, theirs: ModelIdentity | None) -> str:
    """What a node's model differs in from the one that is served; "" when it doesn't, or none is served yet."""
    if ours is None or ours == theirs:
        return ""
    if theirs is None:
        return "it does not say which model it serves"
    return ", ".join(
        f"{name} differs (theirs {getattr(theirs, name)}, ours {getattr(ours, name)})"
        for name in (field.name for field in msgspec.structs.fields(ours))
        if getattr(ours, name) != getattr(theirs, name)
    )
