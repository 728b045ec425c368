"""Transport between GPU pools of one host: the source maps the sink's pool and its kernels store into it.

Stores run on the transfer thread's stream beside the computation; `flush` waits for them. The mapping of an epoch is
closed the moment the epoch is superseded or its process is gone: until then the driver keeps a dead node's memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import torch

from tandem.engine.cuda_driver import HANDLE_BYTES, export_memory, map_memory, unmap_memory
from tandem.engine.errors import TransportError
from tandem.engine.kv_layout import KVLayout
from tandem.kernels.push_blocks import can_push, push_blocks
from tandem.kv_connector.transports.base import BlockPairs
from tandem.kv_connector.transports.geometry import pool_stride_bytes
from tandem.kv_connector.transports.mapped import MappedExport, MappedTransport, Mapping

FLUSH_TIMEOUT_S = 60.0  # a push waits for the step that computes it; this is far beyond any step
FLUSH_POLL_S = 20e-6
LAYER_PROGRAMS = 16
WHOLE_PROGRAMS = 64


class CudaIpcHandle(msgspec.Struct, frozen=True):
    handle: bytes
    offset: int
    stride_bytes: int


class CudaMapping(Mapping):
    """`address` is where our kernels see the other pool's first block."""

    max_write_bytes = 64 << 20  # each copy is a kernel launch: one takes a whole layer of a long chunk

    def __init__(self, device: torch.device, mapped: int, offset: int, stride_bytes: int) -> None:
        super().__init__()
        self._device, self._mapped = device, mapped
        self._address, self._stride_bytes = mapped + offset, stride_bytes
        self._last_copy: torch.cuda.Event | None = None

    def _copy(
        self, source_NHLPBD: torch.Tensor, pairs: BlockPairs, layers: range | None, num_valid: Sequence[int]
    ) -> None:
        programs = WHOLE_PROGRAMS if layers is None else LAYER_PROGRAMS
        push_blocks(source_NHLPBD, self._address, self._stride_bytes, pairs, layers, num_valid, programs)
        self._last_copy = torch.cuda.Event()
        self._last_copy.record(torch.cuda.current_stream(self._device))

    def flush(self) -> None:
        copy = self._last_copy
        deadline = time.monotonic() + FLUSH_TIMEOUT_S
        while copy is not None and not copy.query():
            if time.monotonic() > deadline:
                raise TransportError(f"stores into a peer's pool did not end within {FLUSH_TIMEOUT_S:.0f} s")
            time.sleep(FLUSH_POLL_S)

    def _unmap(self) -> None:
        if self._last_copy is not None:
            self._last_copy.synchronize()
        assert self._device.index is not None, "the pool is on one certain device"
        unmap_memory(self._device.index, self._mapped)


class CudaIpcTransport(MappedTransport):
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
        handle, offset = export_memory(pool.device.index, pool.data_ptr())
        return msgspec.msgpack.encode(CudaIpcHandle(handle, offset, pool_stride_bytes(pool)))

    def _map(self, export: MappedExport, layout: KVLayout) -> Mapping:
        assert self.pool is not None
        try:
            handle = msgspec.msgpack.decode(export.handle, type=CudaIpcHandle)
        except msgspec.MsgspecError as error:
            raise TransportError(f"process {export.pid} exports no pool that cuda_ipc understands: {error}") from error
        if handle.stride_bytes != layout.stride_bytes or len(handle.handle) != HANDLE_BYTES or handle.offset < 0:
            raise TransportError(f"process {export.pid} exports a pool that does not fit its layout")
        device = self.pool.pool_NHLPBD.device
        mapped = map_memory(device.index, handle.handle)
        return CudaMapping(device, mapped, handle.offset, handle.stride_bytes)
