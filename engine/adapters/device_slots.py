"""The slots for adapters on the device: one stack for each projection, over one buffer."""

from __future__ import annotations

import torch

from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.adapters.layout import MOST_PARTS, AdapterLayout
from tandem.kernels.products.adapter_rows import AdapterStack


class DeviceSlots:
    """Memory for `max_loras` adapters. Steps count its slots from 1; `stacks` are by name of the model's module."""

    def __init__(self, layout: AdapterLayout, max_loras: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = max_loras
        self._words = torch.zeros((max_loras, layout.num_elements), dtype=dtype, device=device)
        self._ranks = torch.zeros((max_loras, len(layout.projections), MOST_PARTS), dtype=torch.int32, device=device)
        self.stacks = {
            projection.site.name: AdapterStack(
                self._words[:, projection.a_start : projection.b_start].unflatten(1, (-1, projection.num_inputs)),
                self._words[:, projection.b_start : projection.end].unflatten(1, (-1, layout.rank)),
                self._ranks[:, index],
                projection.part_sizes,
            )
            for index, projection in enumerate(layout.projections)
        }

    def write(self, slot: int, adapter: HostAdapter) -> None:
        """Enqueues the copy on the current stream, behind every step that may still read what was there."""
        self._words[slot - 1].copy_(adapter.words, non_blocking=True)
        self._ranks[slot - 1].copy_(adapter.ranks, non_blocking=True)

    def fill_with_rank(self, rank: int) -> None:
        """Makes every slot count as an adapter of this rank in each part: for warm-up and benchmarks."""
        self._ranks.fill_(rank)
