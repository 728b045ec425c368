"""How a control connection begins and stays alive: Hello, Welcome or Refused; then Ping and Status."""

from __future__ import annotations

from tandem.engine.contracts.wire.adapters import NONE_HELD, HeldAdapters
from tandem.engine.contracts.wire.parts import (
    Message,
    NodeInfo,
    Seconds,
)
from tandem.engine.contracts.wire.work import NO_LEANING, Leaning, NodeReport

WIRE_VERSION = 19


class Hello(Message, frozen=True, kw_only=True):
    """The first message of the connecting side: who it is, and which version of the protocol it speaks."""

    wire_version: int
    info: NodeInfo


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to a Hello that is accepted: who answers."""

    info: NodeInfo


class Refused(Message, frozen=True, kw_only=True):
    """Refusal of a Hello, or of any message before one. `field` names what differs, `ours` and `theirs` the two values;
    `ours` is the sender's."""

    field: str
    ours: str
    theirs: str


class Ping(Message, frozen=True, kw_only=True):
    """Heartbeat of the connecting side; the answer is a Status (from nodes). `sequence` is echoed."""

    sequence: int


class Status(Message, frozen=True, kw_only=True):
    """Heartbeat and load of a node."""

    node_id: str
    epoch: int
    sequence: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # prompt tokens accepted and not yet computed
    num_free_blocks: int = 0
    num_blocks: int = 0
    block_size: int = 0
    draining: bool = False
    # Rates that this node has measured; 0: nothing yet. A decode node's prefill rate is the one beside its decodes.
    # The rates of fetching a prefix from a peer are 0 also when this node never fetches.
    prefill_s_per_token: float = 0.0
    transfer_s_per_token: float = 0.0
    fetch_s_per_token: float = 0.0
    fetch_s_per_token_from: dict[str, float] = {}  # by node_id, where it was measured
    counters: dict[str, float] = {}
    adapters: HeldAdapters = NONE_HELD
    work: NodeReport | None = None  # of a node that orders prompts by deadlines
    leaning: Leaning = NO_LEANING
    age_s: Seconds = 0.0  # seconds since all this was so
