"""Host memory for KV blocks: slots of raw bytes, and as what a block of the device pool is kept in one.

`ExactBlocks` keeps the pool's own bytes. `Fp8Blocks` keeps e4m3 values with a scale for each layer, head and plane
(keys, values), half of bfloat16's bytes; docs/tiers.md says what that costs in precision.
"""

from __future__ import annotations

import mmap
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from tandem.engine.cuda_driver import lock_pages, unlock_pages
from tandem.engine.errors import ConfigError, TransportError
from tandem.kernels.cache_ops import swap_blocks
from tandem.kernels.digest import block_digests
from tandem.kernels.quantization import FP8_DTYPE, FP8_MAX, dequantize, quantize

WORD_BYTES = 8
PIECE_BYTES = 4 << 20  # of a pool, compressed at once: temporary copies are a few times as large


def block_bytes(pool: torch.Tensor) -> int:
    return pool[0].numel() * pool.element_size()


class HostBlocks(ABC):
    """`raw`: uint8 [num_blocks, bytes of a slot], page-aligned; page-locked until `close` when the pool is on a GPU."""

    def __init__(self, pool: torch.Tensor, num_blocks: int) -> None:
        """Content undefined. Raises ConfigError when the memory can't be had."""
        self.raw = _allocate(num_blocks, self.slot_bytes(pool))
        self._unlock = _locked(self, pool.device.index) if pool.is_cuda else None

    def close(self) -> None:
        """When no copy is under way any more. Idempotent."""
        if self._unlock is not None:
            self._unlock()

    @staticmethod
    @abstractmethod
    def slot_bytes(pool: torch.Tensor) -> int:
        """Of one block of `pool` [num_blocks, heads, layers, 2, block_size, head_dim]."""

    @abstractmethod
    def store(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks `pairs[i][0]` of `pool` into slots `pairs[i][1]`; on CUDA enqueued on the current stream."""

    @abstractmethod
    def restore(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        """Slots `pairs[i][0]` into blocks `pairs[i][1]` of `pool`, `layers` of them (None: all); enqueued likewise."""

    def __len__(self) -> int:
        return len(self.raw)

    def digest(self, slot: int, key: int) -> int:
        """64 bits of what is stored there."""
        slots = self.raw.view(len(self.raw), 1, 1, 1, 1, -1)
        return int(block_digests(slots, [slot], key, 1, 1)[0])


class ExactBlocks(HostBlocks):
    def __init__(self, pool: torch.Tensor, num_blocks: int) -> None:
        super().__init__(pool, num_blocks)
        self._blocks = self.raw.view(pool.dtype).view(num_blocks, *pool.shape[1:])

    @staticmethod
    def slot_bytes(pool: torch.Tensor) -> int:
        return block_bytes(pool)

    def store(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        swap_blocks(pool, self._blocks, pairs)

    def restore(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        swap_blocks(self._blocks, pool, pairs, layers)


class Fp8Blocks(HostBlocks):
    """A slot: e4m3 [layers, heads, 2, block_size, head_dim], so that some layers are one run, then float32 scales
    [layers, heads, 2]. Scales are powers of two: what was restored is stored again without another loss."""

    def __init__(self, pool: torch.Tensor, num_blocks: int) -> None:
        super().__init__(pool, num_blocks)
        _, heads, layers, planes, block_size, head_dim = pool.shape
        num_values, num_scales = pool[0].numel(), layers * heads * planes
        first_scale = _whole_words(num_values)
        self._values = self.raw[:, :num_values].unflatten(1, (layers, heads, planes, block_size, head_dim))
        scales = self.raw[:, first_scale : first_scale + 4 * num_scales].view(torch.float32)
        self._scales = scales.unflatten(1, (layers, heads, planes))

    @staticmethod
    def slot_bytes(pool: torch.Tensor) -> int:
        _, heads, layers, planes, _, _ = pool.shape
        return _whole_words(pool[0].numel()) + _whole_words(4 * heads * layers * planes)

    def store(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        for piece in _pieces(pool, pairs):
            values = torch.stack([pool[block] for block, _ in piece]).transpose(1, 2).float()
            scales = power_of_two_scales(values.abs().amax((-2, -1)))
            stored = quantize(values, scales[..., None, None], counts=False).contiguous().view(torch.uint8)
            for index, (_, slot) in enumerate(piece):
                self._values[slot].copy_(stored[index], non_blocking=True)
                self._scales[slot].copy_(scales[index], non_blocking=True)

    def restore(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        part = slice(None) if layers is None else slice(layers.start, layers.stop)
        for piece in _pieces(pool, pairs):
            slots = [slot for slot, _ in piece]
            values = _brought([self._values[slot, part] for slot in slots], pool.device).view(FP8_DTYPE)
            scales = _brought([self._scales[slot, part] for slot in slots], pool.device)
            restored = dequantize(values, scales[..., None, None], pool.dtype).transpose(1, 2)
            for index, (_, block) in enumerate(piece):
                pool[block, :, part].copy_(restored[index])


def power_of_two_scales(peaks: torch.Tensor) -> torch.Tensor:
    """float32 like `peaks`: the least power of two that brings each peak to e4m3's largest value or below. 1.0 for
    peaks of zero, and for those that are not finite."""
    mantissa, exponent = torch.frexp(peaks.float() / FP8_MAX)  # mantissa in [0.5, 1)
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where((peaks > 0) & peaks.isfinite() & (scales > 0), scales, torch.ones_like(scales))


def _brought(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Host tensors of one shape as one on `device`; page-locked ones without waiting for the copies."""
    together = torch.empty((len(parts), *parts[0].shape), dtype=parts[0].dtype, device=device)
    for index, part in enumerate(parts):
        together[index].copy_(part, non_blocking=True)
    return together


def _pieces(pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    size = max(1, PIECE_BYTES // block_bytes(pool))
    return (pairs[first : first + size] for first in range(0, len(pairs), size))


def _whole_words(num_bytes: int) -> int:
    return -(-num_bytes // WORD_BYTES) * WORD_BYTES


def _allocate(num_blocks: int, slot_bytes: int) -> torch.Tensor:
    nbytes = num_blocks * slot_bytes
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"no room for a host tier of {nbytes} bytes ({error}): lower --host-tier-bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, slot_bytes)


def _locked(blocks: HostBlocks, device_index: int) -> weakref.finalize[[int, torch.Tensor], HostBlocks]:
    """Page-locks `blocks`; returns what undoes it, at the latest when nobody has them any more."""
    raw = blocks.raw.zero_()  # by several threads; page-locking touches the pages with one
    try:
        lock_pages(device_index, raw.data_ptr(), raw.numel())
    except TransportError as error:
        raise ConfigError(f"a host tier of {raw.numel()} bytes can't be page-locked ({error}): lower it") from error
    unlock = weakref.finalize(blocks, _unlock, device_index, raw)
    unlock.atexit = False  # the process's end unlocks faster
    return unlock


def _unlock(device_index: int, raw: torch.Tensor) -> None:
    unlock_pages(device_index, raw.data_ptr())
