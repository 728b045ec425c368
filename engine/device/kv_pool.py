"""The node's one KV tensor: how big, where, which shape.

It is allocated once and never moves, so that a transport can export it whole: on CUDA as one plain device allocation
outside expandable segments, on CPU in ordinary memory or inside a writable buffer that a transport gives (shared
memory). It starts as zeros and stays finite: attention multiplies masked positions by 0, which a NaN would survive.
"""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from tandem.engine.contracts.config import CacheOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import DTYPE_BYTES, KVGroup, KVLayout

if TYPE_CHECKING:
    from tandem.engine.contracts.model_shape import ModelShape
    from tandem.engine.device.kv_encoding import LayerScales
    from tandem.engine.parallel.sharding import Shard

MIN_BLOCKS = 2  # a sequence in its first block and the next one
WritableBuffer = mmap.mmap | memoryview | bytearray


def make_layout(
    model_config: ModelShape,
    block_size: int,
    dtype: torch.dtype,
    shard: Shard | None = None,
    scales: LayerScales | None = None,
) -> KVLayout:
    """Layout of a pool that holds every layer of the model in `dtype`; with a `shard`, only that rank's KV heads. fp8
    values are stored divided by `scales`. Raises ConfigError for a dtype that KV can't have."""
    num_kv_heads = model_config.num_kv_heads
    own_kv_heads = num_kv_heads if shard is None else len(shard.kv_heads(num_kv_heads))
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"KV can't be kept as {name}: choose one of {', '.join(DTYPE_BYTES)}")
    keeps_latents = model_config.latent_size is not None
    if keeps_latents and dtype.itemsize == 1:
        raise ConfigError("--kv-cache-dtype fp8_e4m3: latents are kept in 16 bits or more; choose auto")
    group = KVGroup(
        num_layers=model_config.num_layers,
        num_kv_heads=own_kv_heads,
        head_dim=model_config.head_dim,
        dtype=name,
        kind="latent" if keeps_latents else "full",
        num_planes=1 if keeps_latents else 2,
        num_all_kv_heads=num_kv_heads,
        k_scales=() if scales is None else scales.k,
        v_scales=() if scales is None else scales.v,
    )
    size, rank = (1, 0) if shard is None else (shard.size, shard.rank)
    return KVLayout(groups=(group,), block_size=block_size, tp_size=size, tp_rank=rank)


def pool_bytes(layout: KVLayout, num_blocks: int) -> int:
    return layout.stride_bytes * num_blocks


def allocate_pool(
    layout: KVLayout, num_blocks: int, device: torch.device | str, storage: WritableBuffer | None = None
) -> torch.Tensor:
    """Zeroed `[num_blocks, num_kv_heads, num_layers, planes, block_size, head_dim]` on `device`.

    `storage` (CPU only): memory to live in, at least `pool_bytes`, zeroed by its maker (fresh shared memory is); the
    tensor keeps it alive. Raises ConfigError when the memory can't be had.
    """
    device = torch.device(device)
    dtype: torch.dtype = getattr(torch, layout.group.dtype)
    num_elements = pool_bytes(layout, num_blocks) // dtype.itemsize
    if storage is not None:
        flat = _in_buffer(storage, num_elements, dtype, device)
    elif device.type == "cuda":
        flat = _on_cuda(num_elements, dtype, device)
    else:
        flat = torch.zeros(num_elements, dtype=dtype, device=device)
    group = layout.group
    shape = (group.num_kv_heads, group.num_layers, group.num_planes, layout.block_size, group.head_dim)
    payload = layout.payload_bytes // dtype.itemsize
    return flat.view(num_blocks, -1)[:, :payload].unflatten(1, shape)


def _in_buffer(storage: WritableBuffer, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    assert device.type == "cpu", "only a CPU pool can live in a host buffer"
    num_bytes = memoryview(storage).nbytes
    if num_bytes < num_elements * dtype.itemsize:
        raise ConfigError(f"the pool needs {num_elements * dtype.itemsize} bytes, its shared memory has {num_bytes}")
    return torch.frombuffer(storage, dtype=dtype, count=num_elements)


def _on_cuda(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(variable, "").lower():
            raise ConfigError(f"{variable} turns expandable segments on, which can't be shared whole: turn them off")
    torch.cuda.empty_cache()  # the pool must get a cudaMalloc of its own, not the rest of a cached segment
    try:
        return torch.zeros(num_elements, dtype=dtype, device=device)
    except torch.OutOfMemoryError as error:
        gib = num_elements * dtype.itemsize / (1 << 30)
        raise ConfigError(
            f"no room for a KV pool of {gib:.1f} GiB on {device}: lower gpu_memory_utilization or num_blocks"
        ) from error


def num_blocks_for(options: CacheOptions, layout: KVLayout, free_bytes: int, twin_bytes: int = 0) -> int:
    """Blocks of the pool: as asked (`num_blocks`, then `kv_cache_memory_bytes`), else as many as `free_bytes` hold,
    with `twin_bytes` more for each.

    Raises ConfigError when they are fewer than MIN_BLOCKS.
    """
    if options.num_blocks:
        if options.num_blocks < MIN_BLOCKS:
            raise ConfigError(f"num_blocks is {options.num_blocks}: a pool needs at least {MIN_BLOCKS}")
        return options.num_blocks * layout.group.blocks_each
    available = options.kv_cache_memory_bytes or free_bytes
    num_blocks = max(available, 0) // (layout.stride_bytes + twin_bytes)
    if num_blocks < MIN_BLOCKS:
        source = "kv_cache_memory_bytes" if options.kv_cache_memory_bytes else "free memory"
        raise ConfigError(
            f"{source} of {available / (1 << 20):.0f} MiB holds {num_blocks} KV blocks of {layout.block_size} tokens "
            f"and a pool needs at least {MIN_BLOCKS}: use a smaller model, or give more memory"
        )
    return num_blocks


def free_host_bytes(share: float = 0.25, most: int = 4 << 30) -> int:
    """The bytes of host memory that a node takes when nothing is configured: a `share` of what is available now, at
    most `most` bytes."""
    return int(min(psutil.virtual_memory().available * share, _free_in_cgroup(Path("/sys/fs/cgroup")) * share, most))


def _free_in_cgroup(folder: Path) -> float:
    """What this process's container may still take (cgroups v2), its file cache counted as free; inf: no limit."""
    try:
        limit, taken = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return math.inf
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(limit) - int(taken) + int(stat["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return math.inf
