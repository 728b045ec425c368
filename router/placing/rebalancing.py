"""Which nodes should hand running sequences to which others: those that drain, and those much fuller than the rest.

Pure: views of the nodes and time in, decisions out. One per router process; several decide alike, and a target that
they overfill refuses, which leaves a sequence where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.contracts.keys import NodeKey
from tandem.router.placing.view import NodeView

# Sequences of one node on their way at a time: they share its bandwidth, and each new one only delays the others.
MOST_FROM_DRAINING = 4  # a guess
# One by one, so that reports show what the last one changed.
MOST_FROM_FULL = 1
# Pause between two decisions for a node that is merely fuller than others.
REBALANCE_EVERY_S = 1.0  # a guess
# A node this full is relieved if another has room, however little their difference is.
NEARLY_FULL = 0.95  # a guess
# Roles whose requests decode. Between them sequences move.
DECODING = frozenset({"decode", "unified"})
# Share of a target's pool that stays free for the growth of the sequences that it has.
TARGET_HEADROOM = 0.15  # a guess


def kv_use(node: NodeView) -> float:
    """Share of its pool that sequences hold."""
    status = node.status
    return 1 - status.num_free_blocks / status.num_blocks if status.num_blocks else 0.0


@dataclass
class MigrationPolicy:
    """Decides which nodes give sequences away. `rebalance_at` is the difference in KV use, as a share of a pool, from
    which the fuller node gives sequences away, until the difference is half of that; 0: never."""

    rebalance_at: float = 0.0
    _relieved: set[NodeKey] = field(default_factory=set)
    _decided_at: dict[NodeKey, float] = field(default_factory=dict)

    def sources(self, nodes: Sequence[NodeView], now: float) -> list[tuple[NodeView, int]]:
        """(node, how many of its sequences may be on their way at once)."""
        decoders = [node for node in nodes if node.role in DECODING and not node.lost]
        targets = [node for node in decoders if node.usable]
        found = [(node, MOST_FROM_DRAINING) for node in decoders if node.draining and targets]
        if self.rebalance_at and len(targets) > 1:
            emptiest = min(kv_use(node) for node in targets)
            found += [(node, MOST_FROM_FULL) for node in targets if self._is_relieved(node, emptiest, now)]
        self._relieved &= {node.key for node in targets}
        return found

    def target(
        self, source: NodeView, nodes: Sequence[NodeView], num_tokens: int, most_tokens: int = 0
    ) -> NodeView | None:
        """The node that a sequence of `num_tokens` tokens, which may grow to `most_tokens`, moves to: of the same role,
        if one of those has room. None: it stays. Rebalancing must not turn the difference in KV use around."""
        usable = [n for n in nodes if n.role in DECODING and n.usable and not n.silent and n.key != source.key]
        fitting = [node for node in usable if node.model == source.model and _has_room(node, num_tokens)]
        fitting = [node for node in fitting if most_tokens <= node.most_tokens]
        if not source.draining:
            size = num_tokens / max(1, source.status.block_size)
            fitting = [node for node in fitting if kv_use(node) + 2 * size / node.status.num_blocks <= kv_use(source)]
        return min(
            fitting,
            key=lambda node: (node.role != source.role, kv_use(node), node.num_sequences, node.key),
            default=None,
        )

    def moved(self, source: NodeView, now: float) -> None:
        self._decided_at[source.key] = now

    def _is_relieved(self, node: NodeView, emptiest: float, now: float) -> bool:
        use = kv_use(node)
        difference = use - emptiest
        starts = difference >= self.rebalance_at or (use >= NEARLY_FULL and difference > self.rebalance_at / 2)
        if starts:
            self._relieved.add(node.key)
        elif difference <= self.rebalance_at / 2:
            self._relieved.discard(node.key)
        waited = now - self._decided_at.get(node.key, -REBALANCE_EVERY_S)
        return node.key in self._relieved and waited >= REBALANCE_EVERY_S


def _has_room(node: NodeView, num_tokens: int) -> bool:
    status = node.status
    return not status.num_blocks or node.free_tokens - num_tokens >= TARGET_HEADROOM * (
        status.num_blocks * status.block_size
    )
