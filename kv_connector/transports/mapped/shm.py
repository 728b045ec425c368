"""Transport between CPU pools of one host: a pool is a memfd that its peers map through /proc/<pid>/fd.

Memory of the memfd: one page of header (magic, 32 random bytes), then the pool. The random bytes, the process's start
time and the memfd's name in /proc together make it impossible to map anything but the pool that was exported, even
when pid and descriptor numbers have been reused. Seals keep its size, so that no store can fault.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets

import msgspec
import torch

from tandem.engine.contracts.errors import DecodeError, PeerLostError, TransportError
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.kv_connector.layouts.geometry import copy_blocks, pool_stride_bytes, shape_pool
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.mapped.base import MappedExport, MappedTransport, Mapping

_MAGIC = b"tandem kv pool 1"
_MEMFD_NAME = "tandem-kv-pool"
_HEADER_BYTES = mmap.PAGESIZE


class ShmHandle(msgspec.Struct, frozen=True):
    """A pool of another process: its descriptor there, the bytes that prove it, and how far its blocks are apart."""

    fd: int
    nonce: bytes
    stride_bytes: int


_decode_handle: WireDecoder[ShmHandle] = WireDecoder(ShmHandle)


class ShmMapping(Mapping):
    """A mapped CPU pool. It is unmapped when the only reference to its memory is dropped."""

    def __init__(self, pool_NHLPBD: torch.Tensor) -> None:
        super().__init__()
        self._pool: torch.Tensor | None = pool_NHLPBD

    def _copy(self, source_NHLPBD: torch.Tensor, write: Write) -> None:
        assert self._pool is not None, "an open mapping has its memory"
        copy_blocks(source_NHLPBD, self._pool, write.pairs, write.layers, write.num_valid)

    def flush(self, grant_id: int) -> None:
        pass  # a store that returned is in the pool

    def _unmap(self) -> None:
        self._pool = None


class ShmTransport(MappedTransport):
    """KV between CPU pools of one host; the pool itself is made here, so that others can map it."""

    name = "shm"

    def __init__(self) -> None:
        super().__init__()
        self._fd = -1
        self._nonce = secrets.token_bytes(32)
        self._storage: torch.Tensor | None = None

    def is_usable(self, device: torch.device) -> tuple[bool, str]:
        if device.type != "cpu":
            return False, f"shm moves CPU pools only, this pool is on {device}"
        return True, ""

    def pool_storage(self, nbytes: int) -> memoryview:
        """Zeroed shared memory. Raises OSError when the host can't give that much."""
        assert self._storage is None, "one pool a node"
        self._fd = os.memfd_create(_MEMFD_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, _HEADER_BYTES + nbytes)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = mmap.mmap(self._fd, _HEADER_BYTES + nbytes)
        memory[: len(_MAGIC)] = _MAGIC
        memory[len(_MAGIC) : len(_MAGIC) + len(self._nonce)] = self._nonce
        self._storage = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES)
        return memoryview(memory)[_HEADER_BYTES:]

    @property
    def pool_file(self) -> tuple[int, int]:
        """The memfd's descriptor, and the offset in bytes of the memory that `pool_storage` gave."""
        return self._fd, _HEADER_BYTES

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _export_handle(self) -> bytes:
        assert self.pool is not None
        assert self._storage is not None, "the pool must live in memory from pool_storage"
        assert self.pool.pool_NHLPBD.data_ptr() == self._storage.data_ptr(), "the pool begins where its storage begins"
        return msgspec.msgpack.encode(ShmHandle(self._fd, self._nonce, pool_stride_bytes(self.pool.pool_NHLPBD)))

    def _map(self, export: MappedExport, layout: KVLayout) -> Mapping:
        try:
            handle = _decode_handle(export.handle)
        except DecodeError as error:
            raise TransportError(f"process {export.pid} exports no pool that shm understands: {error}") from error
        if handle.stride_bytes != layout.stride_bytes:
            raise TransportError(f"the exported pool's stride {handle.stride_bytes} is not its layout's")
        if export.num_blocks < 1:
            raise TransportError(f"process {export.pid} exports a pool of {export.num_blocks} blocks")
        memory = _open_memfd(export, handle)
        pool_bytes = export.num_blocks * handle.stride_bytes
        if len(memory) < _HEADER_BYTES + pool_bytes:
            raise TransportError(f"process {export.pid} exports fewer bytes than {export.num_blocks} blocks need")
        storage = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES, count=pool_bytes)
        return ShmMapping(shape_pool(storage, layout, export.num_blocks))


def _open_memfd(export: MappedExport, handle: ShmHandle) -> mmap.mmap:
    pidfd = export.process.open_pidfd()
    os.close(pidfd)
    path = f"/proc/{export.pid}/fd/{handle.fd}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_MEMFD_NAME}"):
            raise TransportError(f"{path} is not a KV pool")
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise PeerLostError(f"process {export.pid} is gone or has closed its pool") from error
    except OSError as error:
        raise TransportError(f"can't map the pool of process {export.pid}: {error.strerror}") from error
    try:
        memory = mmap.mmap(fd, 0)
    finally:
        os.close(fd)
    if memory[: len(_MAGIC) + len(handle.nonce)] != _MAGIC + handle.nonce:
        raise TransportError(f"{path} is not the KV pool that was exported")
    return memory
