"""Sums of blocks that are wanted on the host soon: digests of KV that is handed over, between a busy thread's calls.

On CUDA a pass is one copy to the device, one launch and one copy back, through buffers that are kept. Each call of
torch lets go of the interpreter and waits for it again, for up to a switch interval beside a thread that launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tandem.kernels.blocks.digest import BlockRuns, multilinear_sums

WARM_BUFFERS = 4  # passes that run at once; a guess
LEAST_WORDS = 1 << 12  # int64 of a buffer: enough for a prompt of 64k tokens


class SumPass(Protocol):
    """A pass that was begun. Ends with `sums` or `abandon`, whichever comes first."""

    def sums(self) -> np.ndarray:
        """int64 [n] multilinear sums, once; waits for the device."""

    def abandon(self) -> None:
        """Gives the sums up. Returns when no block is read any more."""


class SumPasses:
    """Passes over blocks of one pool. Belongs to one thread."""

    def __init__(self, pool_NHLPBD: torch.Tensor) -> None:
        self._pool_NHLPBD = pool_NHLPBD
        self._runs = BlockRuns.of(pool_NHLPBD) if pool_NHLPBD.is_cuda else None
        self._free: list[_Buffers] = []

    def warm_up(self) -> None:
        """Compiles, and makes the buffers of some passes that run at once: page-locking memory takes the driver ms."""
        begun = [self.begin([0], 0, [1]) for _ in range(WARM_BUFFERS)]
        for each in begun:
            each.abandon()

    def begin(self, block_ids: Sequence[int], key: int, num_valid: Sequence[int]) -> SumPass:
        """Begins the sums of the first `num_valid[i]` slots of each block. On CUDA on the current stream; on CPU it is
        done when this returns. Raises IndexError for blocks that the pool has not."""
        num_blocks = self._pool_NHLPBD.shape[0]
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < num_blocks:
            raise IndexError(f"blocks {[*block_ids]} of a pool of {num_blocks}")
        if self._runs is None or not block_ids:
            return _Done(multilinear_sums(self._pool_NHLPBD, block_ids, key, num_valid).cpu().numpy())
        job = self._runs.job(block_ids, key, num_valid)
        fitting = [each for each in self._free if len(each.job) >= len(job)]
        if fitting:
            self._free.remove(fitting[0])
        buffers = fitting[0] if fitting else _Buffers.of(len(job), self._pool_NHLPBD.device)
        buffers.job[: len(job)] = job
        buffers.device.copy_(buffers.host, non_blocking=True)
        self._runs.enqueue(buffers.device, len(block_ids))
        buffers.host.copy_(buffers.device, non_blocking=True)
        buffers.copied.record()
        return _OnDevice(buffers, len(block_ids), self._free)


@dataclass(frozen=True, eq=False)
class _Buffers:
    host: torch.Tensor  # pinned
    job: np.ndarray  # the same memory
    device: torch.Tensor
    copied: torch.cuda.Event

    @classmethod
    def of(cls, num_words: int, device: torch.device) -> _Buffers:
        size = max(LEAST_WORDS, 1 << (num_words - 1).bit_length())
        host = torch.empty(size, dtype=torch.int64, pin_memory=True)
        return cls(host, host.numpy(), torch.empty(size, dtype=torch.int64, device=device), torch.cuda.Event())


class _Done:
    def __init__(self, sums: np.ndarray) -> None:
        self._sums = sums

    def sums(self) -> np.ndarray:
        return self._sums

    def abandon(self) -> None: ...


class _OnDevice:
    def __init__(self, buffers: _Buffers, num_blocks: int, free: list[_Buffers]) -> None:
        self._buffers: _Buffers | None = buffers
        self._num_blocks, self._free = num_blocks, free

    def sums(self) -> np.ndarray:
        assert self._buffers is not None, "sums are taken once"
        self._await(self._buffers)
        sums = self._buffers.job[: self._num_blocks].copy()
        self._give_back(self._buffers)
        return sums

    def abandon(self) -> None:
        if self._buffers is not None:
            self._await(self._buffers)
            self._give_back(self._buffers)

    @staticmethod
    def _await(buffers: _Buffers) -> None:
        if not buffers.copied.query():
            buffers.copied.synchronize()  # lets go of the interpreter

    def _give_back(self, buffers: _Buffers) -> None:
        self._free.append(buffers)
        self._buffers = None
