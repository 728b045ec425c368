"""Host memory for KV blocks: slots of raw bytes, and the formats in which they keep blocks of the device pool.

`ExactBlocks` keeps the pool's own bytes. `Fp8Blocks` keeps e4m3 values with a scale for each layer, head and plane
(keys, values), half of bfloat16's bytes; docs/tiers.md says what that costs in precision.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from tandem.engine.contracts.errors import ConfigError, TransportError
from tandem.engine.device.cuda_driver import lock_pages, unlock_pages
from tandem.kernels.blocks.cache_ops import swap_blocks
from tandem.kernels.blocks.digest import block_digests
from tandem.kernels.blocks.quantization import FP8_DTYPE, FP8_MAX, dequantize, quantize

WORD_BYTES = 8
PIECE_BYTES = 16 << 20  # compressed or restored at once, in temporary copies ten times as large; a guess


def block_bytes(pool: torch.Tensor) -> int:
    return pool[0].numel() * pool.element_size()


class HostBlocks(ABC):
    """Slots for blocks in host memory. `raw`: uint8 [num_blocks, bytes of a slot], page-aligned; page-locked from
    `lock` to `close`.

    `by_layers` says that blocks can be restored some layers at a time.
    """

    by_layers = True

    def __init__(self, pool: torch.Tensor, num_blocks: int, blocks_each: int = 1) -> None:
        """Allocates `num_blocks` slots of undefined content, each of `blocks_each` places for a block and its window
        blocks. Raises ConfigError when the memory can't be had."""
        self.blocks_each = blocks_each
        self.raw = _allocate(num_blocks, blocks_each * self.slot_bytes(pool))
        self.places = self.raw.view(num_blocks * blocks_each, -1)
        self._unlock: weakref.finalize[[int, torch.Tensor], HostBlocks] | None = None
        self._touching = threading.Thread(target=self.raw.zero_, name="kv-host-pages", daemon=True)
        if pool.is_cuda:
            self._touching.start()  # takes a second for 5 GB, beside whatever else a node does at start

    def lock(self, device_index: int) -> None:
        """Page-locks the memory, before copies to and from that GPU. Raises ConfigError."""
        self._touching.join()
        try:
            lock_pages(device_index, self.raw.data_ptr(), self.raw.numel())
        except TransportError as error:
            text = f"a host tier of {self.raw.numel()} bytes can't be page-locked ({error}): lower --host-tier-bytes"
            raise ConfigError(text) from error
        self._unlock = weakref.finalize(self, _unlock, device_index, self.raw)
        self._unlock.atexit = False  # the process's end unlocks faster

    def close(self) -> None:
        """Unlocks the memory, when no copy is under way any more. Idempotent."""
        if self._unlock is not None:
            self._unlock()

    @staticmethod
    @abstractmethod
    def slot_bytes(pool: torch.Tensor) -> int:
        """Bytes of one block of `pool` [num_blocks, heads, layers, planes, block_size, head_dim]."""

    @abstractmethod
    def store(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks `pairs[i][0]` of `pool` into places `pairs[i][1]`; on CUDA enqueued on the current stream."""

    @abstractmethod
    def restore(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        """Copies `layers` (None: all) of places `pairs[i][0]` into blocks `pairs[i][1]` of `pool`; enqueued as in
        `store`."""

    def __len__(self) -> int:
        return len(self.raw)

    def digest(self, slot: int, key: int) -> int:
        """A 64-bit digest of the slot's bytes under `key`."""
        slots = self.raw.view(len(self.raw), 1, 1, 1, 1, -1)
        return int(block_digests(slots, [slot], key, 1, 1)[0])


class ExactBlocks(HostBlocks):
    """Host slots that keep a block's bytes as the pool has them."""

    def __init__(self, pool: torch.Tensor, num_blocks: int, blocks_each: int = 1) -> None:
        super().__init__(pool, num_blocks, blocks_each)
        self._blocks = self.places.view(pool.dtype).view(num_blocks * blocks_each, *pool.shape[1:])

    @staticmethod
    def slot_bytes(pool: torch.Tensor) -> int:
        return block_bytes(pool)

    def store(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        swap_blocks(pool, self._blocks, pairs)

    def restore(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        swap_blocks(self._blocks, pool, pairs, layers)


class Fp8Blocks(HostBlocks):
    """Keeps blocks as e4m3 [layers, heads, 2, block_size, head_dim], then float32 scales [layers, heads, 2]. Scales are
    powers of two, so that a restored block is stored again without another loss."""

    by_layers = False

    def __init__(self, pool: torch.Tensor, num_blocks: int, blocks_each: int = 1) -> None:
        super().__init__(pool, num_blocks, blocks_each)
        self._shape = pool.shape[1:]

    @staticmethod
    def slot_bytes(pool: torch.Tensor) -> int:
        _, heads, layers, planes, _, _ = pool.shape
        return _whole_words(pool[0].numel()) + _whole_words(4 * heads * layers * planes)

    def store(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        for piece in self._pieces(pairs):
            packed = torch.zeros((len(piece), self.places.shape[1]), dtype=torch.uint8, device=pool.device)
            values, scales = self._parts(packed)
            exact = pool[_sent([block for block, _ in piece], pool.device)].transpose(1, 2).float()
            scales.copy_(power_of_two_scales(exact.abs().amax((-2, -1))))
            values.copy_(quantize(exact, scales[..., None, None], counts=False).view(torch.uint8))
            for index, (_, slot) in enumerate(piece):
                self.places[slot].copy_(packed[index], non_blocking=True)

    def restore(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], layers: range | None = None) -> None:
        assert layers is None, "whole blocks, see `by_layers`"
        for piece in self._pieces(pairs):
            packed = torch.empty((len(piece), self.places.shape[1]), dtype=torch.uint8, device=pool.device)
            for index, (slot, _) in enumerate(piece):
                packed[index].copy_(self.places[slot], non_blocking=True)
            values, scales = self._parts(packed)
            restored = dequantize(values.view(FP8_DTYPE), scales[..., None, None], pool.dtype)
            pool[_sent([block for _, block in piece], pool.device)] = restored.transpose(1, 2)

    def _parts(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parts of uint8 [n, bytes of a slot], as views: bytes of the values, and the scales."""
        heads, layers, planes, block_size, head_dim = self._shape
        num_values, num_scales = self._shape.numel(), layers * heads * planes
        first = _whole_words(num_values)
        scales = packed[:, first : first + 4 * num_scales].view(torch.float32)
        values = packed[:, :num_values].unflatten(1, (layers, heads, planes, block_size, head_dim))
        return values, scales.unflatten(1, (layers, heads, planes))

    def _pieces(self, pairs: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
        size = max(1, PIECE_BYTES // self.places.shape[1])
        return (pairs[first : first + size] for first in range(0, len(pairs), size))


def power_of_two_scales(peaks: torch.Tensor) -> torch.Tensor:
    """Scales for `peaks`, float32 of the same shape: the least power of two that brings each peak to e4m3's largest
    value or below; 1.0 for peaks that are zero or not finite."""
    mantissa, exponent = torch.frexp(peaks.float() / FP8_MAX)  # mantissa in [0.5, 1)
    scales = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where((peaks > 0) & peaks.isfinite() & (scales > 0), scales, torch.ones_like(scales))


def _sent(block_ids: Sequence[int], device: torch.device) -> torch.Tensor:
    """The ids as int64 on `device`, sent without waiting for the device's other work."""
    listed = torch.tensor(block_ids, dtype=torch.int64)
    return listed.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else listed


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


def _unlock(device_index: int, raw: torch.Tensor) -> None:
    """Unlocks the memory. Runs at the latest when nobody has the blocks any more, before the memory is unmapped."""
    unlock_pages(device_index, raw.data_ptr())
