"""What the Hopper products of one device share: the table tuned for it, the workspace of unfinished sums."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from tandem.kernels.products.matmul_plans import SHARED_BYTES, WORKSPACE_WORDS, Table, parse_table
from tandem.kernels.triton_kernels.gluon_support import why_no_gluon


class MatmulWorkspace:
    """Unfinished sums of the products of one stream; a word is EMPTY until a product leaves a sum there, and is emptied
    again by the same product."""

    EMPTY = -1

    def __init__(self, device: torch.device) -> None:
        self.words = torch.full((WORKSPACE_WORDS,), self.EMPTY, dtype=torch.int32, device=device)

    def check_integrity(self) -> None:
        """Waits for the device; between products every word is empty."""
        assert bool((self.words == self.EMPTY).all()), "a product left sums behind"


@functools.cache
def workspace_of(device: torch.device) -> MatmulWorkspace:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the first product of a device is being captured: call kernels.matmul.prepare(device) first")
    return MatmulWorkspace(device)


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether kernels in Gluon run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and not why_no_gluon()


@functools.cache
def shared_bytes_of(device: torch.device) -> int:
    """Shared memory that one program may have. torch's stubs don't know the property, nor do its early versions."""
    if device.type != "cuda":
        return SHARED_BYTES
    return int(getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BYTES))


@functools.cache
def table_of(device: torch.device) -> Table:
    """The table tuned for this device; empty where none was or the kernel can't run."""
    if not is_hopper(device):
        return {}
    properties = torch.cuda.get_device_properties(device)
    file = Path(__file__).parent / "tuned" / f"matmul_{properties.name.replace(' ', '_')}.json"
    if properties.multi_processor_count != 132 or not file.is_file():
        return {}
    return parse_table(file.read_text())
