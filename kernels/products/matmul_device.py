"""What the Hopper products of one device share: the tables tuned for it, the workspace of unfinished sums."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from tandem.kernels.products.matmul_plans import EMPTY, SHARED_BYTES, WORKSPACE_WORDS, Table
from tandem.kernels.products.tuning import stored
from tandem.kernels.products.tuning.candidates import Product
from tandem.kernels.products.tuning.table_file import merged
from tandem.kernels.triton_kernels.gluon_support import why_no_gluon


class MatmulWorkspace:
    """Unfinished sums of the products of one stream; a word is EMPTY until a product leaves a sum there, and is emptied
    again by the same product."""

    EMPTY = EMPTY

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


class DeviceTables(NamedTuple):
    """Where plans for a device come from. All empty where the kernels can't run."""

    shipped: Table  # measured on such a device, and part of Tandem
    made: Table  # measured on this machine
    like: Table  # shipped for others with as many multiprocessors: the rule where nothing was measured

    @property
    def measured(self) -> Table:
        return merged(self.shipped, self.made)


@functools.cache
def tables_of(device: torch.device) -> DeviceTables:
    if not is_hopper(device):
        return DeviceTables({}, {}, {})
    key = stored.key_of(device)
    shipped, like = stored.shipped_tables(key.device, key.multiprocessors)
    return DeviceTables(shipped, stored.load_made(key), like)


def table_of(device: torch.device) -> Table:
    """What was measured on such a device; empty where nothing was or the kernel can't run."""
    return tables_of(device).measured


@functools.cache
def asked_of(device: torch.device) -> set[Product]:
    """The products of 16 bits and few rows that this process has asked for: what a tuning run may measure."""
    return set()
