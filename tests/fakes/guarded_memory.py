"""GPU memory with unmapped addresses before and after it: whatever touches those faults."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

PAGE = 2 << 20  # what the driver maps at once
APART = 32 << 20


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Location), ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Bytes:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def guarded_copy(tensor: torch.Tensor, *, at_end: bool) -> torch.Tensor:
    """A contiguous copy that begins where its mapping begins, or ends where it ends; it stays mapped."""
    driver: Any = ctypes.CDLL("libcuda.so.1")
    num_bytes = tensor.numel() * tensor.element_size()
    size = -(-num_bytes // PAGE) * PAGE
    location = _Location(1, tensor.device.index)  # 1: a device, pinned memory, in the driver's three enumerations
    space, handle = ctypes.c_ulonglong(), ctypes.c_ulonglong()
    wide, nothing = ctypes.c_size_t, ctypes.c_ulonglong(0)
    for status in (
        driver.cuMemAddressReserve(ctypes.byref(space), wide(size + 2 * APART), wide(0), nothing, nothing),
        driver.cuMemCreate(ctypes.byref(handle), wide(size), ctypes.byref(_Properties(1, 0, location)), nothing),
        driver.cuMemMap(ctypes.c_ulonglong(space.value + APART), wide(size), wide(0), handle, nothing),
        driver.cuMemSetAccess(
            ctypes.c_ulonglong(space.value + APART), wide(size), ctypes.byref(_Access(location, 3)), wide(1)
        ),
    ):
        assert status == 0, status
    start = space.value + APART + (size - num_bytes if at_end else 0)
    copy = torch.as_tensor(_Bytes(start, num_bytes), device=tensor.device).view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
