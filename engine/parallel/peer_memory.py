"""Memory of each rank that other ranks map: CUDA IPC between processes of one host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tandem.engine.device.cuda_driver import HANDLE_BYTES, export_memory, map_memory
from tandem.kernels.products.all_reduce import Mail, MailLayout

OFFSET_BYTES = 8
_kept: list[torch.Tensor] = []  # peers map it until their end, so it is never freed
Gather = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RankMemory:
    """A rank's memory at `address`, as kernels of this process's device reach it. Any process of this host can map it
    by `handle`, where it begins at `offset`."""

    address: int
    handle: bytes
    offset: int


def open_mail(rank: int, device: torch.device, gather: Gather, layout: MailLayout) -> Mail:
    """A collective in which every rank makes its mail and maps the others'. `gather` returns every rank's tensor in the
    order of ranks. Raises TransportError where GPUs of this host can't reach each other's memory."""
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # zeroed before a peer may write
    return Mail.make(rank, [each.address for each in share(rank, memory, gather)], layout, device)


def share(own_rank: int, memory: torch.Tensor, gather: Gather) -> list[RankMemory]:
    """A collective in which every rank shows its `memory` and maps the others', for the life of the process. Returns
    them in the order of ranks. `gather` and the errors are those of `open_mail`."""
    _kept.append(memory)
    index = torch.cuda.current_device() if memory.device.index is None else memory.device.index
    handle, offset = export_memory(index, memory.data_ptr())
    raw = bytearray(handle + offset.to_bytes(OFFSET_BYTES, "little"))
    ticket = torch.frombuffer(raw, dtype=torch.uint8).to(memory.device)
    shared = []
    for rank, row in enumerate(bytes(row) for row in gather(ticket).cpu().numpy()):
        handle, offset = row[:HANDLE_BYTES], int.from_bytes(row[HANDLE_BYTES:], "little")
        address = memory.data_ptr() if rank == own_rank else map_memory(index, handle) + offset
        shared.append(RankMemory(address, handle, offset))
    return shared
