"""Transport between GPU pools of one host: the source maps the sink's pool and its kernels store into it.

Stores run on the transfer thread's stream beside the computation; `flush` waits for them. Whole blocks and their layers
go by copy engines, which take no multiprocessor; what is partly filled, and the last layer, by a kernel. Blocks that go
whole are summed for the digests meanwhile.
The mapping of an epoch is closed the moment the epoch is superseded or its process is gone: until then the driver keeps
a dead node's memory.
"""

from __future__ import annotations

import enum
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch

from tandem.engine.contracts.errors import DecodeError, TransportError
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.device.cuda_driver import (
    HANDLE_BYTES,
    Rows,
    copy_rows,
    copy_runs,
    export_memory,
    map_memory,
    unmap_memory,
)
from tandem.kernels.blocks.move_blocks import BlockPlaces
from tandem.kernels.blocks.push_blocks import can_push, list_pairs, push_listed
from tandem.kv_connector.layouts.block_runs import block_runs
from tandem.kv_connector.layouts.geometry import pool_stride_bytes
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.mapped.base import MappedExport, MappedTransport, Mapping
from tandem.kv_connector.transports.mapped.split import SplitMapping

FLUSH_TIMEOUT_S = 60.0  # a push waits for the step that computes it; this is far beyond any step; a guess
FLUSH_POLL_S = 20e-6  # a guess
KEPT_LISTS = 4  # a guess
PROGRAMS, LAST_PROGRAMS = 8, 32  # docs/measurements.md#pushes-out-of-a-gpu
SHORTEST_BLOCK_RUN, SHORTEST_ROW = 64 << 10, 4 << 10  # guesses


class CopyPath(enum.Enum):
    """The ways to move whole blocks. Partly filled blocks are always moved by the kernel."""

    BLOCKS = "blocks"  # copy engines: one call of the driver, with one run for each block
    ROWS = "rows"  # copy engines: one call for each block, with one run for each head
    KERNEL = "kernel"


def way_of(num_layers: int, first: int, count: int, layer_bytes: int) -> tuple[CopyPath, int]:
    """Returns the way to move `count` layers from `first` on, of `layer_bytes` bytes for each head, and the number of
    programs that a kernel gets.

    On H200s 1 GiB goes at 362 GB/s as whole blocks, the kernel needs 132 programs for that; 8, 16 and 32 move 208, 277
    and 323. But each takes a place on a multiprocessor from the computation: prefill slowed down by 2.3 % with 8 of
    them, by 0.9 % with copy engines. These need long runs (of 32 KiB each takes 2.4 us) and few calls, which take the
    host's time. Nothing is computed behind the last layer that the hand-off would not delay more."""
    if count == num_layers and num_layers * layer_bytes >= SHORTEST_BLOCK_RUN:
        return CopyPath.BLOCKS, 0
    if first + count == num_layers:
        return CopyPath.KERNEL, LAST_PROGRAMS
    return (CopyPath.ROWS if layer_bytes * count >= SHORTEST_ROW else CopyPath.KERNEL), PROGRAMS


class CudaIpcHandle(msgspec.Struct, frozen=True):
    """Names memory with `num_heads` heads of each block. A node has one of these for each rank, several of which may
    hold the same heads."""

    handle: bytes
    offset: int
    stride_bytes: int
    num_heads: int
    first_head: int | None = None  # None: the one after those of the handle before


_decode_handles: WireDecoder[list[CudaIpcHandle]] = WireDecoder(list[CudaIpcHandle])


class CudaMapping(Mapping):
    """A mapped GPU pool. `address` is where our kernels see its first block."""

    max_write_bytes = 256 << 20  # some layers of a long chunk; a guess
    # Writes of some layers are not summed: one pass over the blocks when all layers are computed costs less (0.9 % of a
    # prefill) than sums beside the computation (1.3 %). At its priority those don't get on, at a higher one it waits.
    sums_blocks, sums_layers = True, False

    def __init__(self, device: torch.device, mapped: int, offset: int, stride_bytes: int) -> None:
        super().__init__()
        self._device, self._mapped = device, mapped
        self._address, self._stride_bytes = mapped + offset, stride_bytes
        self._listed: OrderedDict[object, torch.Tensor] = OrderedDict()  # lists of blocks pushed last, on the device
        # For sums, which run beside copies and like them before the computation: a sum takes 10 us for each layer, but
        # behind the kernels of the next prompt, of which there are always more, it would wait for that step's end.
        self._sums_stream = torch.cuda.Stream(device, priority=-1)
        self._last_copies: dict[int, torch.cuda.Event] = {}  # by grant, until flushed; others wait for other steps

    def _copy(self, source_NHLPBD: torch.Tensor, write: Write) -> None:
        num_layers, block_size = source_NHLPBD.shape[2], source_NHLPBD.shape[4]
        layers = write.span(num_layers)
        layer_bytes = BlockPlaces.of(source_NHLPBD).layer_bytes
        way, num_programs = way_of(num_layers, layers.start, len(layers), layer_bytes)
        by_engine, by_kernel = list[int](), list[int]()
        for index, valid in enumerate(write.num_valid):
            (by_engine if valid == block_size and way is not CopyPath.KERNEL else by_kernel).append(index)
        if by_engine:
            self._by_engine(source_NHLPBD, write.take(by_engine), layers, way)
        if by_kernel:
            self._by_kernel(source_NHLPBD, write.take(by_kernel), layers, num_programs or PROGRAMS)
        copied = self._last_copies[write.grant.grant_id] = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self._device))

    def _by_engine(self, source_NHLPBD: torch.Tensor, write: Write, layers: range, way: CopyPath) -> None:
        """Moves whole blocks by copy engines, and takes sums beside the copies. It makes few calls of torch, since each
        of them waits for the interpreter beside a busy step loop."""
        current = torch.cuda.current_stream(self._device)
        sums, listed = write.sums, None
        if sums is not None:
            listed = self._list_once(write)
            self._sums_stream.wait_stream(current)
        heads, source = range(source_NHLPBD.shape[1]), BlockPlaces.of(source_NHLPBD)
        target = replace(source, address=self._address, block_bytes=self._stride_bytes)
        assert self._device.index is not None, "the pool is on one certain device"
        if way is CopyPath.BLOCKS:
            copy_runs(self._device.index, *block_runs(source, target, write.pairs, heads, layers), current.cuda_stream)
        else:
            to, origin, nbytes = block_runs(source, target, write.pairs, heads[:1], layers)
            rows = Rows(int(nbytes[0]), len(heads), target.head_bytes, source.head_bytes)
            copy_rows(self._device.index, to, origin, rows, current.cuda_stream)
        if sums is not None and listed is not None:
            with torch.cuda.stream(self._sums_stream):
                sums.sums.add_layers(source_NHLPBD, listed, layers)
            current.wait_event(self._sums_stream.record_event())

    def _by_kernel(self, source_NHLPBD: torch.Tensor, write: Write, layers: range, num_programs: int) -> None:
        summed, target = None if write.sums is None else write.sums.sums, (self._address, self._stride_bytes)
        push_listed(source_NHLPBD, *target, self._list_once(write), layers, num_programs, summed)

    def _list_once(self, write: Write) -> torch.Tensor:
        """The write's list of blocks on the device. Layer after layer moves the same blocks on the same stream, so it
        is sent once and kept."""
        sum_indices = () if write.sums is None else tuple(write.sums.indices)
        wanted = (tuple(map(tuple, write.pairs)), tuple(write.num_valid), sum_indices)
        if wanted not in self._listed:
            self._listed[wanted] = list_pairs(write.pairs, write.num_valid, sum_indices, self._device)
            while len(self._listed) > KEPT_LISTS:
                self._listed.popitem(last=False)
        return self._listed[wanted]

    def flush(self, grant_id: int) -> None:
        copied = self._last_copies.get(grant_id)
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while copied is not None and not copied.query():
            if time.monotonic() > deadline:
                raise TransportError(f"stores into a peer's pool did not end within {FLUSH_TIMEOUT_S:.0f} s")
            time.sleep(FLUSH_POLL_S)
        self._last_copies.pop(grant_id, None)

    def _unmap(self) -> None:
        for copied in list(self._last_copies.values()):
            copied.synchronize()
        assert self._device.index is not None, "the pool is on one certain device"
        unmap_memory(self._device.index, self._mapped)


class CudaIpcTransport(MappedTransport):
    """KV between GPUs of one host through memory that CUDA shares between processes."""

    name = "cuda_ipc"

    def is_usable(self, device: torch.device) -> tuple[bool, str]:
        """Asks the driver with a small allocation: some containers and virtual machines refuse to share memory."""
        if device.type != "cuda":
            return False, f"cuda_ipc moves GPU pools only, this pool is on {device}"
        index = torch.cuda.current_device() if device.index is None else device.index
        probe = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        try:
            export_memory(index, probe.data_ptr())
        except TransportError as error:
            return False, error.message
        return True, ""

    def pool_storage(self, nbytes: int) -> memoryview | None:
        return None

    def _export_handle(self) -> bytes:
        assert self.pool is not None
        pool = self.pool.pool_NHLPBD
        problem = can_push(pool)
        if problem:
            raise TransportError(problem)
        if self.pool.ranks is not None:
            parts = self.pool.ranks.parts
            handles = [
                CudaIpcHandle(p.memory.handle, p.memory.offset, p.stride_bytes, len(p.heads), p.heads.start)
                for p in parts
            ]
        else:
            handle, offset = export_memory(pool.device.index, pool.data_ptr())
            handles = [CudaIpcHandle(handle, offset, pool_stride_bytes(pool), pool.shape[1])]
        return msgspec.msgpack.encode(handles)

    def _map(self, export: MappedExport, layout: KVLayout) -> Mapping:
        assert self.pool is not None
        try:
            handles = _decode_handles(export.handle)
        except DecodeError as error:
            raise TransportError(f"process {export.pid} exports no pool that cuda_ipc understands: {error}") from error
        if not fits(handles, layout):
            raise TransportError(f"process {export.pid} exports a pool that does not fit its layout")
        device, parts = self.pool.pool_NHLPBD.device, list[tuple[range, Mapping]]()
        try:
            for handle, heads in zip(handles, heads_of(handles), strict=True):
                mapped = map_memory(device.index, handle.handle)
                parts.append((heads, CudaMapping(device, mapped, handle.offset, handle.stride_bytes)))
        except TransportError:
            for _, part in parts:
                part.close()
            raise
        return parts[0][1] if len(parts) == 1 else SplitMapping(parts, sum_blocks)


def sum_blocks(source_NHLPBD: torch.Tensor, write: Write) -> None:
    """Sums blocks whose heads go into several memories. Partly filled ones are summed by the kernel that sums what it
    moves: it moves them onto themselves."""
    layers, block_size = write.span(source_NHLPBD.shape[2]), source_NHLPBD.shape[4]
    for is_whole in (True, False):
        chosen = write.take([i for i, valid in enumerate(write.num_valid) if (valid == block_size) is is_whole])
        if not chosen.pairs or chosen.sums is None:
            continue
        own = [(source, source) for source, _ in chosen.pairs]
        listed = list_pairs(own, chosen.num_valid, chosen.sums.indices, source_NHLPBD.device)
        if is_whole:
            chosen.sums.sums.add_layers(source_NHLPBD, listed, layers)
        else:
            here = source_NHLPBD.data_ptr(), pool_stride_bytes(source_NHLPBD)
            push_listed(source_NHLPBD, *here, listed, layers, PROGRAMS, chosen.sums.sums)


def heads_of(handles: Sequence[CudaIpcHandle]) -> list[range]:
    """Which heads of a block each one's memory has."""
    runs, after = list[range](), 0
    for handle in handles:
        first = after if handle.first_head is None else handle.first_head
        runs.append(range(first, first + handle.num_heads))
        after = runs[-1].stop
    return runs


def fits(handles: Sequence[CudaIpcHandle], layout: KVLayout) -> bool:
    """Whether memory so described can hold a pool of this layout."""
    num_heads = layout.group.num_kv_heads
    head_bytes = layout.payload_bytes // num_heads
    runs = heads_of(handles)
    if not all(0 <= run.start < run.stop <= num_heads for run in runs):
        return False
    if {head for run in runs for head in run} != set(range(num_heads)):
        return False
    if len(handles) == 1 and handles[0].stride_bytes != layout.stride_bytes:
        return False
    return all(
        handle.stride_bytes >= handle.num_heads * head_bytes
        and len(handle.handle) == HANDLE_BYTES
        and handle.offset >= 0
        for handle in handles
    )
