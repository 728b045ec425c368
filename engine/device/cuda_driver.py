"""The few calls of the CUDA driver that torch has no equal for: memory that other processes can map, page-locking.

torch's own sharing keeps imports alive through a cache and counts references in files; a transport must unmap at a
moment of its choosing. A call of the CUDA runtime that fails makes a later, innocent one of torch's fail too. All calls
run in the device's primary context, the one that torch uses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np

from tandem.engine.contracts.errors import TransportError

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_FOR_ALL_DEVICES = 1
_IN_STREAM_ORDER, _BESIDE_COMPUTATION = 1, 1
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ

_streams_wait = False  # whether a stream of this process has been made to wait for a value


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _StridedCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("source_x", ctypes.c_size_t), ("source_y", ctypes.c_size_t), ("source_kind", ctypes.c_int),
        ("source_host", ctypes.c_void_p), ("source", ctypes.c_uint64), ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("target_x", ctypes.c_size_t), ("target_y", ctypes.c_size_t), ("target_kind", ctypes.c_int),
        ("target_host", ctypes.c_void_p), ("target", ctypes.c_uint64), ("target_array", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes. The locations are hints for managed memory only."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_location", ctypes.c_int * 2),
        ("target_location", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


@cache
def _library() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"no CUDA driver: {error}") from error
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_IpcHandle), ctypes.c_uint64]
    library.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    ]
    library.cuMemcpyAsync.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    library.cuMemHostRegister_v2.argtypes = [ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint]
    library.cuMemHostUnregister.argtypes = [ctypes.c_uint64]
    _check("cuInit", library.cuInit(0), library)
    return library


def _library_of_short_calls() -> ctypes.CDLL:
    """The driver's library, called while this thread keeps the GIL. Calls here take a few µs; if each let go of the
    GIL, getting it back could take as long as other threads please. Once streams wait for the host, though, any call
    may wait for them, in its queue or for a lock of the driver's, and the thread that ends the wait needs the GIL: two
    nodes that computed a prompt together stood still like that. So from the first such wait on calls let go of it."""
    return _library() if _streams_wait else _library_with_gil()


@cache
def _library_with_gil() -> ctypes.PyDLL:
    _library()
    return ctypes.PyDLL("libcuda.so.1")


def export_memory(device_index: int, address: int) -> tuple[bytes, int]:
    """(handle, offset of `address` in what the handle stands for). Raises TransportError where sharing is refused."""
    library = _library()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    with _primary_context(device_index):
        found = library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
        _check("cuMemGetAddressRange", found, library)
        _check("cuIpcGetMemHandle", library.cuIpcGetMemHandle(ctypes.byref(handle), base.value), library)
    return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES), address - base.value


def map_memory(device_index: int, handle: bytes) -> int:
    """Address at which kernels of `device_index` reach the memory; to be given to `unmap_memory`."""
    library = _library()
    address = ctypes.c_uint64()
    raw = _IpcHandle.from_buffer_copy(handle)
    with _primary_context(device_index):
        opened = library.cuIpcOpenMemHandle_v2(ctypes.byref(address), raw, _LAZY_ENABLE_PEER_ACCESS)
        _check("cuIpcOpenMemHandle", opened, library)
    return address.value


def copy_runs(
    device_index: int, targets_N: np.ndarray, sources_N: np.ndarray, sizes_N: np.ndarray, stream: int
) -> None:
    """Enqueues N copies on `stream`, a handle of torch's: addresses, and sizes in bytes, uint64 [N]. Between devices
    the copy engines do them, in any order. Neighbouring copies are merged. It is a single call of the driver, if the
    driver has one for many copies (CUDA 13) and `stream` is not the default one, which that call refuses."""
    if not len(sizes_N):
        return
    library = _library()
    targets, sources, sizes = merged_runs(targets_N, sources_N, sizes_N)
    with _primary_context(device_index):
        if not stream or not hasattr(library, "cuMemcpyBatchAsync_v2"):
            for target, source, nbytes in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
                _check("cuMemcpyAsync", library.cuMemcpyAsync(target, source, nbytes, stream), library)
            return
        attributes = _CopyAttributes(source_order=_IN_STREAM_ORDER, flags=_BESIDE_COMPUTATION)
        columns = [ctypes.c_void_p(column.ctypes.data) for column in (targets, sources, sizes)]
        found = library.cuMemcpyBatchAsync_v2(
            *columns, ctypes.c_size_t(len(sizes)), ctypes.byref(attributes), ctypes.byref(ctypes.c_size_t(0)),
            ctypes.c_size_t(1), ctypes.c_void_p(stream),
        )  # fmt: skip
        _check("cuMemcpyBatchAsync", found, library)


@dataclass(frozen=True, slots=True)
class Rows:
    """Memory in `count` runs of `nbytes` bytes each; the distances from one run's start to the next are in bytes,
    too."""

    nbytes: int
    count: int
    target_distance: int
    source_distance: int


def copy_rows(device_index: int, targets_N: np.ndarray, sources_N: np.ndarray, rows: Rows, stream: int) -> None:
    """Enqueues N copies of such rows, whose first ones are at these addresses, on `stream` as `copy_runs` does."""
    library = _library_of_short_calls()
    copy = _StridedCopy(
        source_kind=_ON_DEVICE, source_pitch=rows.source_distance, target_kind=_ON_DEVICE,
        target_pitch=rows.target_distance, width=rows.nbytes, height=rows.count,
    )  # fmt: skip
    described, handle = ctypes.byref(copy), ctypes.c_void_p(stream)
    with _primary_context(device_index):
        for target, source in zip(targets_N.tolist(), sources_N.tolist(), strict=True):
            copy.target, copy.source = target, source
            result = library.cuMemcpy2DAsync_v2(described, handle)
            if result:
                _check("cuMemcpy2DAsync", result, _library())


def merged_runs(
    targets_N: np.ndarray, sources_N: np.ndarray, sizes_N: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(targets, sources, sizes in bytes), uint64 and contiguous: of the given runs, each that continues the one before
    it on both sides has become part of it."""
    continues = (targets_N[1:] == targets_N[:-1] + sizes_N[:-1]) & (sources_N[1:] == sources_N[:-1] + sizes_N[:-1])
    first = np.flatnonzero(np.concatenate(([True], ~continues)))
    return targets_N[first], sources_N[first], np.add.reduceat(sizes_N, first)


def unmap_memory(device_index: int, address: int) -> None:
    library = _library()
    with _primary_context(device_index):
        _check("cuIpcCloseMemHandle", library.cuIpcCloseMemHandle(address), library)


def lock_pages(device_index: int, address: int, nbytes: int) -> None:
    """Page-locks host memory, so that copies to and from GPUs are asynchronous. `unlock_pages` must be called before
    the memory is unmapped. Raises TransportError, e.g. for more than the user may lock."""
    library = _library()
    with _primary_context(device_index):
        locked = library.cuMemHostRegister_v2(address, nbytes, _FOR_ALL_DEVICES)
        _check("cuMemHostRegister", locked, library)


def unlock_pages(device_index: int, address: int) -> None:
    library = _library()
    with _primary_context(device_index):
        _check("cuMemHostUnregister", library.cuMemHostUnregister(address), library)


def wait_for_value(device_index: int, stream: int, address: int, least: int) -> None:
    """Lets a stream wait until the int32 at `address`, in page-locked memory, is at least `least`. Raises
    TransportError when the driver refuses."""
    global _streams_wait
    _streams_wait, library = True, _library()
    with _primary_context(device_index):
        wait = library.cuStreamWaitValue32_v2
        wait.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        _check("cuStreamWaitValue32", wait(stream, address, least, _AT_LEAST), _library())


@contextmanager
def _primary_context(device_index: int) -> Iterator[None]:
    library = _library()
    context = _retained_context(device_index)
    _check("cuCtxPushCurrent", library.cuCtxPushCurrent_v2(context), library)
    try:
        yield
    finally:
        popped = ctypes.c_void_p()
        _check("cuCtxPopCurrent", library.cuCtxPopCurrent_v2(ctypes.byref(popped)), library)


@cache
def _retained_context(device_index: int) -> ctypes.c_void_p:
    """The device's primary context, kept for the life of the process as torch does."""
    library = _library()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(device), device_index), library)
    _check("cuDevicePrimaryCtxRetain", library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), library)
    return context


def _check(call: str, result: int, library: ctypes.CDLL) -> None:
    if result == 0:
        return
    text = ctypes.c_char_p()
    library.cuGetErrorName(result, ctypes.byref(text))
    raise TransportError(f"{call}: {(text.value or b'unknown error').decode()} ({result})")
