"""What pulling a prefix from each peer takes, as measured here, and whether it beats computing it. Pure."""

from __future__ import annotations

from collections import OrderedDict

from tandem.engine.rate import Rate

MAX_PEERS = 1024
# Of computing a token: what pulling it is taken to cost before the first was pulled, and what computing it is taken to
# cost before the first was computed. A node that never tried would never know.
GUESSED_SHARE, GUESSED_COMPUTE_S = 0.25, 1 / 20_000


class PullRates:
    """Seconds a token, from the question to the commit: the way, the peer's answers and its tiers are in it."""

    def __init__(self) -> None:
        self._all = Rate()
        self._by_peer: OrderedDict[str, Rate] = OrderedDict()

    def measured(self, node_id: str, num_tokens: int, seconds: float) -> None:
        """A pull of so many tokens; one that took too long counts with the time that was waited for it."""
        rate = self._by_peer.setdefault(node_id, Rate())
        self._by_peer.move_to_end(node_id)
        if len(self._by_peer) > MAX_PEERS:
            self._by_peer.popitem(last=False)
        for each in (rate, self._all):
            each.measured(num_tokens, seconds)

    def is_worth(self, node_id: str, compute_s_per_token: float) -> bool:
        """Whether pulling is expected to be faster. A rate that says no is believed a little less each time: others'
        load, which it may have been measured under, passes."""
        rate = self._by_peer.get(node_id)
        if rate is None or not compute_s_per_token or rate.seconds < compute_s_per_token:
            return True
        rate.doubt()
        return False

    def s_per_token(self, compute_s_per_token: float) -> float:
        """From any peer."""
        return self._all.seconds or GUESSED_SHARE * (compute_s_per_token or GUESSED_COMPUTE_S)

    def by_peer(self) -> dict[str, float]:
        return {node_id: rate.seconds for node_id, rate in self._by_peer.items()}
