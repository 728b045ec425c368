"""Which nodes should hand running sequences to which others: those that drain, those much fuller than the rest, and
those whose streams are late where others have time.

Pure: views of the nodes and time in, decisions out. One per router process; several decide alike, and a target that
they overfill refuses, which leaves a sequence where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import AIMED_AT
from tandem.router.placing.view import NodeView

# Sequences of one node on their way at a time: they share its bandwidth, and each new one only delays the others.
MOST_FROM_DRAINING = 4  # a guess
# One by one, so that reports show what the last one changed.
MOST_FROM_FULL = 1
# Pause between two decisions for a node that is merely fuller than others.
REBALANCE_EVERY_S = 1.0  # a guess
# A node this full is relieved if another has room, however little their difference is.
NEARLY_FULL = 0.95  # a guess
# A stream that would be late moves only where it leaves a step this share of the streams' time, at most. What begins at
# AIMED_AT must not have come to a node a moment ago.
IN_TIME = 0.8  # a guess
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
    which the fuller node gives sequences away, until the difference is half of that; 0: never. `moves_late`: whether
    nodes do that, too, whose streams are late, or who are for prompts first and late with those."""

    rebalance_at: float = 0.0
    moves_late: bool = False
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
        taken = {node.key for node, _ in found}
        late = [n for n in targets if self.moves_late and n.key not in taken and is_late(n, now)]
        return found + [(n, MOST_FROM_FULL) for n in late if self._has_waited(n, now)]

    def target(
        self, source: NodeView, nodes: Sequence[NodeView], num_tokens: int, most_tokens: int = 0, now: float = 0.0
    ) -> NodeView | None:
        """The node that a sequence of `num_tokens` tokens, which may grow to `most_tokens`, moves to: of the same role,
        if one of those has room. None: it stays. Rebalancing must not turn the difference in KV use around."""
        usable = [n for n in nodes if n.role in DECODING and n.usable and not n.silent and n.key != source.key]
        fitting = [node for node in usable if node.model == source.model and _has_room(node, num_tokens)]
        fitting = [node for node in fitting if most_tokens <= node.most_tokens]
        if not source.draining and self.moves_late and is_late(source, now):
            fitting = [node for node in fitting if _has_time(node, num_tokens, now)]
        elif not source.draining:
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
        return node.key in self._relieved and self._has_waited(node, now)

    def _has_waited(self, node: NodeView, now: float) -> bool:
        return now - self._decided_at.get(node.key, -REBALANCE_EVERY_S) >= REBALANCE_EVERY_S


def is_late(node: NodeView, now: float) -> bool:
    """Whether its streams are slower than promised, or make prompts late on a node that is for prompts first."""
    outlook = node.outlook
    if outlook is None or not outlook.num_streams or not outlook.report.targets.tpot_s:
        return False
    is_slow = outlook.report.step_s > AIMED_AT * outlook.report.targets.tpot_s
    return is_slow or (node.leaning == "prefill" and outlook.late_s(now) > 0)


def _has_time(node: NodeView, num_tokens: int, now: float) -> bool:
    """Whether a stream of so many tokens, and those that are on their way there, are in time on a node."""
    outlook = node.outlook
    if outlook is None or node.leaning == "prefill" or outlook.late_s(now) > 0:
        return False
    report = outlook.report
    step_s = report.step_s + (1 + outlook.num_placed) * num_tokens * report.stream_s_per_token
    return step_s <= IN_TIME * report.targets.tpot_s


def _has_room(node: NodeView, num_tokens: int) -> bool:
    status = node.status
    return not status.num_blocks or node.free_tokens - num_tokens >= TARGET_HEADROOM * (
        status.num_blocks * status.block_size
    )
