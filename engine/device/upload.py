"""Moves the small host arrays of a step to the device in one copy."""

from __future__ import annotations

import numpy as np
import torch


def upload(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Device twins of `arrays`: float arrays as float64, integer arrays as int64, each in its own shape.

    All travel as one buffer of 8-byte words. On CUDA it is pinned and the copy doesn't wait; the pinned memory goes
    back to torch's host allocator, which hands it out again only when the copy is done.
    """
    num_words = sum(array.size for array in arrays)
    host = torch.empty(num_words, dtype=torch.int64, pin_memory=device.type == "cuda")
    words = host.numpy()
    offset = 0
    for array in arrays:
        target = words[offset : offset + array.size]
        if array.dtype.kind == "f":
            target = target.view(np.float64)
        target[:] = array.reshape(-1)
        offset += array.size
    sent = host.to(device, non_blocking=True)
    views, offset = [], 0
    for array in arrays:
        part = sent[offset : offset + array.size]
        if array.dtype.kind == "f":
            part = part.view(torch.float64)
        views.append(part.view(array.shape))
        offset += array.size
    return views
