"""Measures how long pulling a prefix from each peer takes, and says whether that beats computing it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from tandem.engine.contracts.rate import Rate

MAX_PEERS = 1024  # a guess
# Assumed before the first measurement: pulling a token costs GUESSED_SHARE of computing it, and computing it takes
# GUESSED_COMPUTE_S. They let a node try: one that never tried would never know. Both are guesses.
GUESSED_SHARE, GUESSED_COMPUTE_S = 0.25, 1 / 20_000
# A rate that nothing has confirmed for so long is forgotten: the load that it was measured under has passed, and while
# it keeps routers from pulling, nothing would measure it again.
FORGOTTEN_S = 60.0  # a guess


@dataclass(slots=True)
class _Measured:
    rate: Rate = field(default_factory=Rate)
    at: float = -FORGOTTEN_S

    def note(self, num_tokens: int, seconds: float, now: float) -> None:
        if now - self.at >= FORGOTTEN_S:
            self.rate = Rate()
        self.rate.measured(num_tokens, seconds)
        self.at = now

    def seconds(self, now: float) -> float:
        """Seconds for each token; 0 when that is not known."""
        return self.rate.seconds if now - self.at < FORGOTTEN_S else 0.0


class PullRates:
    """Pull times in seconds for each token, from the question until the KV has come: network, the peer's answers and
    its tiers included. `now` is in seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._all = _Measured()
        self._by_peer: OrderedDict[str, _Measured] = OrderedDict()

    def measured(self, node_id: str, num_tokens: int, seconds: float, now: float) -> None:
        """Notes a pull of `num_tokens`. One that took too long counts with the time that was waited for it; the first
        from a peer does not count, since it includes making connections and channels."""
        one = self._by_peer.get(node_id)
        if one is None:
            self._by_peer[node_id] = _Measured()
            if len(self._by_peer) > MAX_PEERS:
                self._by_peer.popitem(last=False)
            return
        self._by_peer.move_to_end(node_id)
        for each in (one, self._all):
            each.note(num_tokens, seconds, now)

    def is_worth(self, node_id: str, compute_s_per_token: float, now: float) -> bool:
        """Whether pulling is expected to be faster."""
        one = self._by_peer.get(node_id)
        return one is None or not compute_s_per_token or one.seconds(now) < compute_s_per_token

    def s_per_token(self, compute_s_per_token: float, now: float) -> float:
        """Seconds that pulling a token takes, measured over all peers; a guess before the first measurement."""
        return self._all.seconds(now) or GUESSED_SHARE * (compute_s_per_token or GUESSED_COMPUTE_S)

    def by_peer(self, now: float) -> dict[str, float]:
        """Seconds that pulling a token takes, by node_id; peers without a measurement are left out."""
        return {node_id: each.seconds(now) for node_id, each in self._by_peer.items() if each.seconds(now)}
