"""Memory of each rank that all other ranks map: CUDA IPC between processes of one host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.cuda_driver import HANDLE_BYTES, export_memory, map_memory
from tandem.engine.parallel.sharding import Shard
from tandem.kernels.all_reduce import Mail, MailLayout

OFFSET_BYTES = 8
_kept: list[torch.Tensor] = []  # peers map it until their end, so it is never freed


def open_mail(
    shard: Shard, device: torch.device, gather: Callable[[torch.Tensor], torch.Tensor], layout: MailLayout
) -> Mail:
    """A collective: every rank makes its mail and maps the others'. `gather` gives every rank's tensor, in the order of
    ranks. Raises TransportError where GPUs of this host can't reach each other's memory."""
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)  # zeroed before a peer may write
    _kept.append(memory)
    index = torch.cuda.current_device() if device.index is None else device.index
    handle, offset = export_memory(index, memory.data_ptr())
    ticket = torch.frombuffer(bytearray(handle + offset.to_bytes(OFFSET_BYTES, "little")), dtype=torch.uint8).to(device)
    addresses = []
    for rank, raw in enumerate(bytes(row) for row in gather(ticket).cpu().numpy()):
        if rank == shard.rank:
            addresses.append(memory.data_ptr())
        else:
            begin = map_memory(index, raw[:HANDLE_BYTES])
            addresses.append(begin + int.from_bytes(raw[HANDLE_BYTES:], "little"))
    return Mail.make(shard.rank, addresses, layout, device)
