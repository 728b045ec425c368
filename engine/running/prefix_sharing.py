"""The prefixes that decode rows of a step share: found on the host when the batch changes, kept on the device.

Which groups there are depends on block tables alone, and a table's leading blocks stay as long as its slot does: a
step with the slots of the step before costs one comparison.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from tandem.engine.running.batch_state import BatchState
from tandem.engine.scheduling.step import ScheduledRow
from tandem.kernels.api.attention import Attention
from tandem.kernels.prefixes.prefix_groups import SharingCosts, choose_groups, chunk_members
from tandem.kernels.prefixes.shared_prefix import PrefixBuffers, SharedPrefixes


class PrefixSharing:
    """Finds the leading blocks that rows of a step share. Its device buffers serve every step, replayed or not."""

    def __init__(self, state: BatchState, max_rows: int, costs: SharingCosts) -> None:
        self._state = state
        self._costs = costs
        self._buffers = PrefixBuffers(max_rows, costs.members, state.device)
        self._seen: tuple[int, bytes] | None = None
        self._saved_bytes = 0

    @property
    def members(self) -> int:
        """Rows that may read a prefix together."""
        return self._costs.members

    @classmethod
    def for_layers(cls, layers: Iterable[Attention], state: BatchState, max_rows: int) -> PrefixSharing | None:
        """Makes one for these layers, whose caches must be bound; None when no layer could use it."""
        able = [layer for layer in layers if layer.shares_prefixes]
        members = chunk_members(max((layer.spec.group_size for layer in able), default=1))
        if max_rows < 2 or not able or members < 2:
            return None
        _, kv_heads, planes, _, head_size = able[0].kv_cache[0].shape
        token_bytes = kv_heads * planes * head_size * able[0].kv_cache[0].element_size()
        return cls(state, max_rows, SharingCosts(members, token_bytes))

    def of_rows(self, rows: Sequence[ScheduledRow]) -> SharedPrefixes | None:
        """What these rows (one token each, in this order) share; None where reading it once would not pay.

        Enqueues the copy to the device when it differs from the step before.
        """
        slots = np.fromiter((row.slot for row in rows), np.int64, len(rows))
        seen = (self._state.num_table_changes, slots.tobytes())
        if seen != self._seen:
            block_size = self._state.block_size
            whole = np.fromiter((row.start for row in rows), np.int64, len(rows)) // block_size
            groups = choose_groups(self._state.host_block_table_SB, slots, whole, block_size, self._costs)
            if groups:
                self._buffers.load(groups, block_size)
            self._seen, self._saved_bytes = seen, self._costs.saved_by(groups, block_size)
        if not self._saved_bytes:
            return None
        return replace(self._buffers.prefixes.first(len(rows)), saved_bytes=self._saved_bytes)

    def nothing(self, num_rows: int) -> SharedPrefixes:
        """Shared prefixes without any group. Warm-up and capture run the same kernels with them."""
        self._buffers.load((), self._state.block_size)
        self._seen = None
        return self._buffers.prefixes.first(num_rows)
