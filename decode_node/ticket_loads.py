"""Prefixes that a sink brings up from its own lower tiers before it makes the ticket of a hand-off, which is shorter by
as much. Pure.

For sources on other hosts only: within a host a push takes less time than a load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.scheduling.ports import LowerTiers
from tandem.engine.scheduling.request import Request
from tandem.node.requests import AcceptedRequest

# The longest that a ticket waits for a load. Its source may be done with the prompt soon; and so two tickets that each
# wait for blocks which the other holds end their wait.
PATIENCE_S = 0.3  # a guess


@dataclass(frozen=True)
class _Load:
    entry: AcceptedRequest
    hashes: Sequence[bytes]
    until: float


class TicketLoads:
    """Loads for tickets. `tiers` holds the blocks loaded for a request until `due` has named it and `forget` is
    called."""

    def __init__(self, pool: BlockPool, tiers: LowerTiers, block_size: int) -> None:
        self.num_loads = 0
        self._pool, self._tiers, self._block_size = pool, tiers, block_size
        self._loads: dict[Request, _Load] = {}

    def begin(self, entry: AcceptedRequest, now: float) -> bool:
        """Begins a load for a request, whose block hashes must have been made. Returns False if there is nothing to
        load, so that the ticket can be made at once."""
        request = entry.request
        if not self._pool.enable_caching or not request.prompt.use_prefix_cache:
            return False
        hashes = request.block_hashes[: max(0, request.num_prompt_tokens - 1) // self._block_size]
        load = _Load(entry, hashes, now + PATIENCE_S)
        if not self._is_under_way(load):
            self._tiers.ended(request)
            return False
        self.num_loads += 1
        self._loads[request] = load
        return True

    def due(self, now: float) -> list[AcceptedRequest]:
        """The requests whose load has ended, or has taken too long."""
        return [load.entry for load in self._loads.values() if now >= load.until or not self._is_under_way(load)]

    def forget(self, request: Request) -> None:
        """Forgets a request whose ticket is made, or will not be. Idempotent."""
        if self._loads.pop(request, None) is not None:
            self._tiers.ended(request)

    def _is_under_way(self, load: _Load) -> bool:
        hits = self._pool.match_prefix(load.hashes)
        return self._tiers.prepare(load.entry.request, load.hashes, hits, runs_alone=False) is None
