"""The adapters of one rank of a node: read from folders, kept in host memory, brought into slots of the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from tandem.engine.adapters.device_slots import DeviceSlots
from tandem.engine.adapters.host_adapter import AdapterLoader
from tandem.engine.adapters.layout import AdapterLayout
from tandem.engine.adapters.store import AdapterStore
from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.models.adapter_sites import Site
from tandem.kernels.products.adapter_rows import AdapterStack


class TakesAdapters(Protocol):
    """A model as this rank computes it, with products that adapters may be added to."""

    def adapter_sites(self) -> tuple[Site, ...]: ...

    def take_adapters(self, stacks: Mapping[str, AdapterStack]) -> None: ...


class NodeAdapters:
    """Implements `AdapterMemory`."""

    def __init__(self, sites: Iterable[Site], options: LoraOptions, dtype: torch.dtype, device: torch.device) -> None:
        layout = AdapterLayout.of(sites, options.max_lora_rank)
        self.loader = AdapterLoader(layout, dtype, pinned=device.type == "cuda")
        self.store = AdapterStore(self.loader.load, options.lora_host_bytes)
        self._slots = DeviceSlots(layout, options.max_loras, dtype, device)

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def stacks(self) -> Mapping[str, AdapterStack]:
        return self._slots.stacks

    def load(self, slot: int, ref: AdapterRef) -> None:
        """Enqueues the copy of an adapter, which is in host memory, into a slot."""
        self._slots.write(slot, self.store.get(ref))

    def fill_with_rank(self, rank: int) -> None:
        self._slots.fill_with_rank(rank)
