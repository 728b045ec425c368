"""On CPU the ranks of a node keep their heads in one pool of shared memory.

A block of it holds all KV heads of the model once, so it looks like the pool of a node of one rank: KV moves to and
from it whatever the other node's number of ranks is, by rank 0 alone. A rank computes on its run of heads. Where there
are fewer heads than ranks, neighbours write the same numbers to the same place.
"""

from __future__ import annotations

import mmap
import os

import msgspec
import torch

from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.device.kv_pool import allocate_pool, pool_bytes
from tandem.node.ranks.channel import PoolFile

_MEMFD_NAME = "tandem-rank-pool"


def ranks_share_pool(rank: KVLayout, device: torch.device) -> bool:
    """Whether ranks of layout `rank` share one pool: on CPU."""
    return rank.tp_size > 1 and device.type == "cpu"


def ranks_show_pools(rank: KVLayout, device: torch.device) -> bool:
    """Whether rank 0 moves KV to and from every rank's own pool, as it does on GPUs."""
    return rank.tp_size > 1 and device.type == "cuda"


def whole_layout(rank: KVLayout) -> KVLayout:
    """The layout of the pool that ranks with layouts like `rank`'s make together: that of a node of one rank."""
    group = msgspec.structs.replace(rank.group, num_kv_heads=rank.group.num_all_kv_heads)
    return msgspec.structs.replace(rank, groups=(group,), tp_size=1, tp_rank=0)


def heads_of_rank(pool_NHLPBD: torch.Tensor, rank: KVLayout) -> torch.Tensor:
    """The part of `pool_NHLPBD`, which has all heads, that this rank computes on; not a copy."""
    heads = rank.own_heads
    return pool_NHLPBD[:, heads.start : heads.stop]


def make_storage(nbytes: int) -> tuple[memoryview, PoolFile]:
    """Zeroed memory that other processes of this user can map, for the life of this process. Raises OSError."""
    fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return memoryview(mmap.mmap(fd, nbytes)), PoolFile(fd, 0)


def map_in_rank(file: PoolFile, rank: KVLayout, num_blocks: int) -> torch.Tensor:
    """This rank's part of the pool that rank 0, the parent process, has in `file`. Raises OSError when it is gone."""
    layout = whole_layout(rank)
    fd = os.open(f"/proc/{os.getppid()}/fd/{file.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(fd, file.offset + pool_bytes(layout, num_blocks))
    finally:
        os.close(fd)
    return heads_of_rank(allocate_pool(layout, num_blocks, "cpu", memoryview(memory)[file.offset :]), rank)
