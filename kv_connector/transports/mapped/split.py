"""A mapping of another node's pool that lies in several memories, those of its ranks' GPUs, each with some heads of
every block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.mapped.base import Mapping

# Takes a pool with all heads, and the write that says what to sum of it.
SumBlocks = Callable[[torch.Tensor, Write], None]


class SplitMapping(Mapping):
    """Writes blocks with all heads into `parts`, which say which heads are where. `sum_blocks` sums them, where that
    can be done."""

    def __init__(self, parts: Sequence[tuple[range, Mapping]], sum_blocks: SumBlocks | None = None) -> None:
        super().__init__()
        self._parts, self._sum_blocks = parts, sum_blocks
        self.sums_blocks = sum_blocks is not None
        self.max_write_bytes = min(mapping.max_write_bytes for _, mapping in parts)

    def _copy(self, source_NHLPBD: torch.Tensor, write: Write) -> None:
        if write.sums is not None:
            assert self._sum_blocks is not None, "the parts would each make sums of blocks of their own"
            self._sum_blocks(source_NHLPBD, write)
            write = write._replace(sums=None)
        for heads, mapping in self._parts:
            mapping.copy_in(source_NHLPBD[:, heads.start : heads.stop], write)

    def flush(self, grant_id: int) -> None:
        for _, mapping in self._parts:
            mapping.flush(grant_id)

    def _unmap(self) -> None:
        for _, mapping in self._parts:
            mapping.close()
