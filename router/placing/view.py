"""A connected node in the figures that placement needs. Pure: time is passed in, in seconds of a monotonic clock."""

from __future__ import annotations

import math
from collections.abc import Hashable

from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import MARK_BYTES, NodeInfo, PeerRef
from tandem.router.placing.outlook import PREFILL_S_PER_TOKEN, Outlook

# From a placement until the node's step loop has it.
ON_ITS_WAY_S = 0.01  # a guess
# Moving a token's KV is cheaper than computing it, but not free: this share of computing it.
TRANSFER_SHARE = 0.25  # a guess
# Reading an adapter, until a node has read one.
ADAPTER_READ_S = 0.1  # a guess
# Half-life of `num_new_tokens`.
NEW_TOKENS_MEMORY_S = 300.0  # a guess
TELLS_OF_LAYERS = frozenset({"local", "shm", "cuda_ipc"})  # transports of a host by which chunks are used as they come
_ODD, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


class NodeView:
    """A node's last Status, and the placements of this router that the Status doesn't show yet.

    `idle_at` runs between two reports: it grows by what is placed and lies still while the node works that off. A
    report corrects it, but only as far as the report can know better.
    """

    __slots__ = (
        "_status_at",
        "adapters",
        "draining",
        "fetch_gain_s_per_token",
        "fetch_s_per_token",
        "free_tokens",
        "idle_at",
        "info",
        "key",
        "kind",
        "lost",
        "model",
        "most_precise_tokens",
        "most_tokens",
        "num_new_tokens",
        "num_sequences",
        "num_unseen",
        "outlook",
        "prefill_s_per_token",
        "role",
        "seed",
        "silent",
        "status",
        "transfer_s_per_token",
        "unseen",
    )

    def __init__(self, info: NodeInfo, status: Status, now: float = 0.0) -> None:
        self.info = info
        self.key = info.key
        self.role = info.role
        self.model = info.identity.key() if info.identity is not None else b""
        self.kind = _kind(info, self.model)
        self.most_tokens = info.max_model_len or math.inf  # to which a sequence may grow here: the pool may be small
        self.most_precise_tokens = info.most_precise_tokens
        self.lost = False
        self.silent = False  # for some heartbeats: it may be lost soon, and gets only what nobody else can take
        # ping sequence that was current when placed -> (prompt tokens to compute there, sequences)
        self.unseen: dict[int, tuple[int, int]] = {}
        self.seed = int.from_bytes(info.node_id.encode()[-64:], "big") * _ODD & _MASK
        self.idle_at = 0.0
        self.num_new_tokens = 0.0  # tokens that this router's placements brought into its cache in the last minutes
        self.outlook: Outlook | None = None  # where the node reports its work
        self._status_at = now
        self.note_status(status, now)

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.info.node_id, self.info.epoch, self.info.control_address)

    @property
    def tag(self) -> int:
        """64 bits that name this epoch of the node, equal in every router process."""
        return (self.seed ^ self.info.epoch) & _MASK

    @property
    def usable(self) -> bool:
        return not (self.lost or self.draining)

    @property
    def leaning(self) -> str:
        """The work that it is for first, by its role or, where it does all work, by its leaning; "unified": neither."""
        return self.status.leaning.role if self.role == "unified" else self.role

    def backlog_s(self, now: float) -> float:
        """Seconds of prompt work that it has, as far as is known."""
        return max(0.0, self.idle_at - now)

    def note_placement(
        self, ping_sequence: int, num_tokens: int, num_sequences: int, now: float, num_new_tokens: int = 0
    ) -> None:
        """Counts a placement that the node's Status doesn't show yet. `num_tokens`: prompt tokens to be computed there;
        `num_new_tokens`: those that the node's cache doesn't hold yet."""
        tokens, sequences = self.unseen.get(ping_sequence, (0, 0))
        self.unseen[ping_sequence] = tokens + num_tokens, sequences + num_sequences
        self.num_unseen += num_sequences
        self.num_sequences += num_sequences
        self.idle_at = max(self.idle_at, now) + num_tokens * self.prefill_s_per_token
        self.num_new_tokens += num_new_tokens

    def adapter_s(self, mark: bytes) -> float:
        """What it takes to bring the adapter of this mark into the node's memory; b"": the model alone."""
        if not mark or mark in self.adapters:
            return 0.0
        return self.status.adapters.read_s or ADAPTER_READ_S

    def note_adapter(self, mark: bytes) -> None:
        """Counts an adapter that a placement brings there, until the next Status says."""
        if mark:
            self.adapters |= {mark}

    def note_silence(self, silent: bool) -> None:
        self.silent = silent

    def note_draining(self) -> None:
        self.draining = True

    def note_lost(self) -> None:
        self.lost = True

    def note_status(self, status: Status, now: float) -> None:
        """Takes a new Status. A node's step loop publishes its load a moment after its I/O thread took a message: what
        was placed after the ping is not in the answer; what was placed just before may be, or may even be done."""
        told_at = now - status.age_s
        if status.work is None:
            self.outlook = None
        elif self.outlook is None:
            self.outlook = Outlook(self.key, status.work, told_at)
        else:
            self.outlook.note_report(status.work, told_at - ON_ITS_WAY_S, told_at)
        self.num_new_tokens *= 0.5 ** ((now - self._status_at) / NEW_TOKENS_MEMORY_S)
        self._status_at = now
        self.status = status
        self.draining = status.draining
        self.unseen = {sent: load for sent, load in self.unseen.items() if sent + 2 > status.sequence}
        marks = status.adapters.marks
        self.adapters = frozenset(marks[at : at + MARK_BYTES] for at in range(0, len(marks), MARK_BYTES))
        self.num_unseen = sum(count for _, count in self.unseen.values())
        self.num_sequences = status.num_running + status.num_waiting + self.num_unseen
        self.prefill_s_per_token = status.prefill_s_per_token or PREFILL_S_PER_TOKEN
        self.transfer_s_per_token = status.transfer_s_per_token or TRANSFER_SHARE * self.prefill_s_per_token
        self.fetch_s_per_token = fetch = status.fetch_s_per_token
        self.fetch_gain_s_per_token = max(0.0, self.prefill_s_per_token - fetch) if fetch else 0.0  # 0: not worth it
        self.free_tokens = status.num_free_blocks * status.block_size if status.num_blocks else math.inf
        surely = sum(tokens for sent, (tokens, _) in self.unseen.items() if sent >= status.sequence)
        perhaps = sum(tokens for tokens, _ in self.unseen.values()) - surely
        least = now + (status.num_waiting_tokens + surely) * self.prefill_s_per_token
        self.idle_at = min(max(self.idle_at, least), least + perhaps * self.prefill_s_per_token)


def _kind(info: NodeInfo, model: bytes) -> Hashable | None:
    """What nodes have in common that may compute one prompt together: work of one kind, on one host, where layers reach
    the other while they are computed, into blocks that are alike. None: it shares with nobody; ranks beside the first
    wait for no layer under a step, chunks are not sent by block tables, and nodes that share experts out launch every
    step together."""
    layout, ways = info.layout, TELLS_OF_LAYERS & info.transports.keys()
    if layout is None or layout.group.num_windows or info.num_ranks != 1 or info.group_size != 1 or not ways:
        return None
    return info.role, info.host_id, model, layout.block_size, layout.groups, layout.tp_size, frozenset(ways)


def affinity(session: int, node: NodeView) -> int:
    """How much a session likes a node: rendezvous hashing, equal in every router process (Thaler, Ravishankar 1998).
    `session` is a 64-bit hash of its name."""
    mixed = (session ^ node.seed) * _ODD & _MASK
    return (mixed ^ mixed >> 32) * _ODD & _MASK
