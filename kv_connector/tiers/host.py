"""Copies between host memory and the device pool: one thread for each direction.

On CUDA each direction has a stream of its own beside all computation. A save reads blocks that nothing writes, or whose
copy will be thrown away (docs/tiers.md); a load writes blocks that no launched step touches. Where each rank has a
pool, whole blocks are gathered on rank 0's device, and come back the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from tandem.kv_connector.layouts.layer_groups import layer_groups
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.protocol.jobs import LoadEvent
from tandem.kv_connector.tiers.host_blocks import HostBlocks
from tandem.kv_connector.tiers.job_thread import JobThread
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save

Pairs = Sequence[tuple[int, int]]


class HostTier:
    """The host tier. `post` is called with each job's JobDone, from its threads. `ranks`: what `blocks` keeps is
    gathered from these, of which `pool` is rank 0's."""

    def __init__(
        self, pool: torch.Tensor, blocks: HostBlocks, post: Callable[[JobDone], None], ranks: RankPools | None = None
    ) -> None:
        self.pool, self.blocks, self._ranks = pool, blocks, ranks
        self._place_bytes = blocks.places.shape[1]
        num_layers = pool.shape[2]
        self._groups: list[range | None] = [*layer_groups(num_layers)] if blocks.by_layers else [None]
        self._save_stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None
        self._load_stream = torch.cuda.Stream(pool.device) if pool.is_cuda else None
        # A new thread's current device is 0, and leaving a stream of another device would restore it: making its
        # context takes seconds, in which the interpreter is held, and memory on a GPU that is not this node's.
        begin = partial(torch.cuda.set_device, pool.device) if pool.is_cuda else lambda: None
        self._saves = JobThread("kv-save", post, begin)
        self._loads = JobThread("kv-load", post, begin)
        self.counters = {"tier_saved_bytes": 0.0, "tier_loaded_bytes": 0.0}

    def submit(self, job: Save | Load) -> None:
        if isinstance(job, Save):
            self._saves.submit(job, lambda: self._save(job))
        else:
            self._loads.submit(job, lambda: self._load(job))

    def step_load(self, load: Load) -> StepLoad:
        """The load as ConnectorWorker starts it, under the forward pass of a step."""
        return StepLoad(self, load)

    def warm_up(self) -> None:
        """Page-locks host memory and compiles what saves and loads need; before any of them. Raises ConfigError."""
        if self.pool.is_cuda:
            self.blocks.lock(self.pool.device.index)
        self._store([(0, 0)])
        if self._ranks is not None:
            self._restore([(0, 0)])
            return
        scratch = torch.empty_like(self.pool[:1])
        for layers in self._groups:
            self.blocks.restore(scratch, [(0, 0)], layers)

    def close(self) -> None:
        ended = [self._saves.stop(), self._loads.stop()]
        if all(ended):
            self.blocks.close()

    def start_step_load(self, load: Load) -> Mapping[int, LoadEvent]:
        """Starts a load; returns, for each layer, the event after which that layer of the blocks is there. Does not
        wait for a copy. Not with ranks, of which rank 0 alone would wait for these events."""
        assert self._ranks is None, "loads of several ranks come before their step"
        pairs = self._load_pairs(load)
        groups = self._groups
        events: list[LoadEvent] = []
        self.counters["tier_loaded_bytes"] += len(pairs) * self._place_bytes
        if self._load_stream is None:
            flags = [threading.Event() for _ in groups]
            self._loads.submit(load, lambda: self._load_layers(pairs, groups, flags))
            events += flags
        else:
            marks = [torch.cuda.Event() for _ in groups]
            with torch.cuda.stream(self._load_stream):
                for layers, mark in zip(groups, marks, strict=True):
                    self.blocks.restore(self.pool, pairs, layers)
                    mark.record()
            self._loads.submit(load, marks[-1].synchronize)
            events += marks
        every = range(self.pool.shape[2])
        return {layer: event for layers, event in zip(groups, events, strict=True) for layer in layers or every}

    # --- threads --------------------------------------------------------------------------------------------

    def _save(self, job: Save) -> tuple[bytes, ...]:
        pairs = self._pairs(job)
        with _waited_for(self._save_stream):
            self._store(pairs)
        self.counters["tier_saved_bytes"] += len(pairs) * self._place_bytes
        return ()

    def _load(self, job: Load) -> tuple[bytes, ...]:
        pairs = self._load_pairs(job)
        with _waited_for(self._load_stream):
            self._restore(pairs)
        self.counters["tier_loaded_bytes"] += len(pairs) * self._place_bytes
        return ()

    def _pairs(self, job: Save | Load) -> list[tuple[int, int]]:
        """(block, place on the host) of all that a job copies: a block's window blocks are behind it in its slot."""
        each = self.blocks.blocks_each
        listed = zip(job.block_ids, job.window_ids, job.host_slots, strict=True)
        return [
            (moved, slot * each + index)
            for block_id, window_ids, slot in listed
            for index, moved in enumerate((block_id, *window_ids))
        ]

    def _load_pairs(self, job: Load) -> list[tuple[int, int]]:
        """The same the other way round: (place on the host, block)."""
        return [(place, block_id) for block_id, place in self._pairs(job)]

    def _store(self, pairs: Pairs) -> None:
        """Copies blocks `pairs[i][0]` of the device into places `pairs[i][1]`."""
        if self._ranks is None:
            self.blocks.store(self.pool, pairs)
            return
        for piece in self._ranks.pieces(pairs):
            gathered = self._ranks.new_blocks(len(piece))
            self._ranks.gather([block for block, _ in piece], None, gathered)
            self.blocks.store(gathered, [(index, slot) for index, (_, slot) in enumerate(piece)])

    def _restore(self, pairs: Pairs) -> None:
        """Copies places `pairs[i][0]` into blocks `pairs[i][1]` of the device."""
        if self._ranks is None:
            self.blocks.restore(self.pool, pairs)
            return
        for piece in self._ranks.pieces(pairs):
            gathered = self._ranks.new_blocks(len(piece))
            self.blocks.restore(gathered, [(slot, index) for index, (slot, _) in enumerate(piece)])
            size = self._ranks.layout.block_size
            self._ranks.scatter(gathered, [block for _, block in piece], None, [size] * len(piece))

    def _load_layers(
        self, pairs: list[tuple[int, int]], groups: Sequence[range | None], flags: Sequence[threading.Event]
    ) -> None:
        try:
            for layers, flag in zip(groups, flags, strict=True):
                self.blocks.restore(self.pool, pairs, layers)
                flag.set()
        finally:  # a failed load ends the node, and must not let it hang before
            for flag in flags:
                flag.set()


class StepLoad:
    """A load that runs under a step; implements LayerLoad. One that fails ends the node."""

    def __init__(self, tier: HostTier, load: Load) -> None:
        self._tier, self._load = tier, load

    def start(self, pool: torch.Tensor) -> Mapping[int, LoadEvent]:
        assert pool.data_ptr() == self._tier.pool.data_ptr(), "a load goes into the pool that it was planned for"
        return self._tier.start_step_load(self._load)


@contextmanager
def _waited_for(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """A context whose work is enqueued on `stream` and complete when it is left."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
