"""What simulated nodes are for first, moved by the product's rule (docs/leanings.md). Running streams stay where they
are. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.scheduling.work.reporter import LATELY_S
from tandem.router.placing.leaning import Candidate, LeaningPolicy, Side
from tandem.router.placing.outlook import Outlook


class PromptShare:
    """The share of a node's time that prompts took lately, as it would report it."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque([(0.0, 0.0)])

    def at(self, now: float, prefill_s: float) -> float:
        """`prefill_s`: seconds of prompt work since the beginning."""
        self._seen.append((now, prefill_s))
        while len(self._seen) > 2 and self._seen[1][0] <= now - LATELY_S:
            self._seen.popleft()
        since, before_s = self._seen[0]
        return min(1.0, (prefill_s - before_s) / (now - since)) if now > since else 0.0


class SimulatedLeanings:
    """The leanings of all nodes, which demand may change. `changes`: when which node came to be for what."""

    def __init__(self, sides: Mapping[NodeKey, Side]) -> None:
        self.sides: dict[NodeKey, Side] = dict(sides)
        self.changes: list[tuple[float, NodeKey, Side]] = []
        self._since = dict.fromkeys(sides, 0.0)
        self._policy = LeaningPolicy()

    def look(self, outlooks: Iterable[Outlook], now: float) -> None:
        """Looks once a heartbeat whether a node should turn."""
        nodes = [
            Candidate(each, self.sides[each.key], True, now - self._since[each.key])
            for each in outlooks
            if each.key in self.sides
        ]
        change = self._policy.change(nodes, now) if nodes else None
        if change is not None:
            key, leaning = change
            side: Side = "prefill" if leaning.role == "prefill" else "decode"
            self.sides[key], self._since[key] = side, now
            self.changes.append((now, key, side))
