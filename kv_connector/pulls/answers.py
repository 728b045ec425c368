"""What a node says to a peer that asks for blocks, whether it has them or would have to compute them. Pure."""

from __future__ import annotations

from tandem.engine.contracts.errors import HandshakeError
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.handoff import KVPull, KVRelease
from tandem.kv_connector.layouts.plan import plan
from tandem.kv_connector.protocol import outcomes


def layout_problem(ours: KVLayout | None, theirs: KVLayout | None) -> str:
    """The reason why our blocks can't be theirs, byte for byte; "" when they can."""
    if ours is None or theirs is None:
        return outcomes.UNKNOWN
    try:
        keeps_blocks = plan(ours, theirs).keeps_blocks
    except HandshakeError:
        keeps_blocks = False
    return "" if keeps_blocks else outcomes.OTHER_LAYOUT


def refusal(pull: KVPull, source_epoch: int, reason: str) -> KVRelease:
    """The answer that nothing will come."""
    return KVRelease(request_id=pull.request_id, attempt=pull.attempt, source_epoch=source_epoch, reason=reason)
