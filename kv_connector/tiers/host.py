"""Host memory for KV blocks, and the copies between it and the device pool: one thread for each direction.

On CUDA the memory is page-locked, each direction has a stream of its own beside all computation, and whole blocks go
through the copy engines. A save reads blocks that nothing writes, or whose copy will be thrown away (docs/tiers.md); a
load writes blocks that no launched step touches.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.engine.errors import ConfigError
from tandem.kernels.cache_ops import swap_blocks
from tandem.kv_connector.tiers.job_thread import JobThread
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save
from tandem.kv_connector.worker import LoadEvent

LAYER_GROUPS = 8  # of a load under a forward pass: few launches, and the first layers don't wait for the last


def block_bytes(pool: torch.Tensor) -> int:
    return pool[0].numel() * pool.element_size()


def allocate_host_pool(pool: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """`num_blocks` blocks like those of `pool`, page-aligned; page-locked if `pool` is on a GPU. Content undefined.

    Raises ConfigError when the memory can't be had.
    """
    nbytes = num_blocks * block_bytes(pool)
    try:
        memory = mmap.mmap(-1, nbytes)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"no room for a host tier of {nbytes} bytes ({error}): lower --host-tier-bytes") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    if pool.is_cuda:
        raw.zero_()  # by several threads; page-locking touches the pages with one
        failure = int(torch.cuda.cudart().cudaHostRegister(raw.data_ptr(), nbytes, 0))
        if failure:
            raise ConfigError(f"a host tier of {nbytes} bytes can't be page-locked (CUDA error {failure}): lower it")
    return raw.view(pool.dtype).view(num_blocks, *pool.shape[1:])


class HostTier:
    """`post` takes each job's JobDone, from the threads."""

    def __init__(self, pool: torch.Tensor, host: torch.Tensor, post: Callable[[JobDone], None]) -> None:
        self.pool, self.host = pool, host
        self._post = post
        self._save_stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None
        self._load_stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None
        self._saves = JobThread("kv-save", post)
        self._loads = JobThread("kv-load", post)
        self.counters = {"tier_saved_bytes": 0.0, "tier_loaded_bytes": 0.0}

    def submit(self, job: Save | Load) -> None:
        if isinstance(job, Save):
            self._saves.submit(job, lambda: self._save(job))
        else:
            self._loads.submit(job, lambda: self._load(job))

    def step_load(self, load: Load) -> StepLoad:
        """For ConnectorWorker, under the forward pass of a step."""
        return StepLoad(self, load)

    def warm_up(self) -> None:
        """Compiles what a load beside layers needs."""
        scratch = torch.empty_like(self.pool[:1])
        for layers in layer_groups(self.pool.shape[2]):
            swap_blocks(self.host, scratch, [(0, 0)], layers)

    def close(self) -> None:
        self._saves.stop()
        self._loads.stop()

    def start_step_load(self, load: Load) -> Mapping[int, LoadEvent]:
        """Layer -> event after which that layer of the blocks is there. Does not wait for a copy."""
        pairs = list(zip(load.host_slots, load.block_ids, strict=True))
        groups = layer_groups(self.pool.shape[2])
        events: list[LoadEvent] = []
        self.counters["tier_loaded_bytes"] += len(pairs) * block_bytes(self.pool)
        if self._load_stream is None:
            flags = [threading.Event() for _ in groups]
            self._loads.submit(load, lambda: self._load_layers(pairs, groups, flags))
            events += flags
        else:
            marks = [torch.cuda.Event() for _ in groups]
            with torch.cuda.stream(self._load_stream):
                for layers, mark in zip(groups, marks, strict=True):
                    swap_blocks(self.host, self.pool, pairs, layers)
                    mark.record()
            self._loads.submit(load, marks[-1].synchronize)
            events += marks
        return {layer: event for layers, event in zip(groups, events, strict=True) for layer in layers}

    # --- threads --------------------------------------------------------------------------------------------

    def _save(self, job: Save) -> tuple[bytes, ...]:
        pairs = list(zip(job.block_ids, job.host_slots, strict=True))
        self._copy(self.pool, self.host, pairs, self._save_stream)
        self.counters["tier_saved_bytes"] += len(pairs) * block_bytes(self.pool)
        return ()

    def _load(self, job: Load) -> tuple[bytes, ...]:
        pairs = list(zip(job.host_slots, job.block_ids, strict=True))
        self._copy(self.host, self.pool, pairs, self._load_stream)
        self.counters["tier_loaded_bytes"] += len(pairs) * block_bytes(self.pool)
        return ()

    def _load_layers(
        self, pairs: list[tuple[int, int]], groups: Sequence[range], flags: Sequence[threading.Event]
    ) -> None:
        try:
            for layers, flag in zip(groups, flags, strict=True):
                swap_blocks(self.host, self.pool, pairs, layers)
                flag.set()
        finally:  # a failed load ends the node; it must not hang it first
            for flag in flags:
                flag.set()

    def _copy(
        self, source: torch.Tensor, target: torch.Tensor, pairs: list[tuple[int, int]], stream: torch.cuda.Stream | None
    ) -> None:
        with _on(stream):
            swap_blocks(source, target, pairs)
        if stream is not None:
            stream.synchronize()


class StepLoad:
    """One load under a step, as worker.LayerLoad has it."""

    def __init__(self, tier: HostTier, load: Load) -> None:
        self._tier, self._load = tier, load

    def start(self, pool: torch.Tensor) -> Mapping[int, LoadEvent]:
        assert pool.data_ptr() == self._tier.pool.data_ptr(), "a load goes into the pool that it was planned for"
        return self._tier.start_step_load(self._load)


def layer_groups(num_layers: int) -> list[range]:
    size = -(-num_layers // LAYER_GROUPS)
    return [range(first, min(first + size, num_layers)) for first in range(0, num_layers, size)]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
