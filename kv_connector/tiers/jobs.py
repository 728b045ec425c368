"""The jobs that the tier manager (step loop) gives to the copying threads, and their answers. Frozen plain data.

Slots belong to the host pool or the disk file, blocks to the device pool. No torch. Each job is answered by one event
that names it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.engine.scheduling.step import StepMeta
from tandem.kv_connector.protocol.jobs import LayerLoad, StepMoves


@dataclass(frozen=True, slots=True)
class Save:
    """Copies blocks from device to host. They may change meanwhile; the manager finds out (`generations`)."""

    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    host_slots: tuple[int, ...]
    generations: tuple[tuple[int, ...], ...]  # of each block and its window blocks
    flushes: int  # how often the tiers had been flushed when it was asked for
    window_ids: tuple[tuple[int, ...], ...]  # those of each block, which go into its slot behind it; (): it has none


@dataclass(frozen=True, slots=True)
class Load:
    """Copies from host to device, into blocks that the manager has allocated."""

    number: int
    hashes: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    block_ids: tuple[int, ...]
    window_ids: tuple[tuple[int, ...], ...]  # as of a Save: into these, what is behind the block in its slot


@dataclass(frozen=True, slots=True)
class Spill:
    """Copies from host to disk, with the records that find the blocks again after a restart."""

    hashes: tuple[bytes, ...]
    parents: tuple[bytes | None, ...]
    tenants: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    disk_slots: tuple[int, ...]
    are_whole: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Copies from disk to host, and checks each block by its digest."""

    number: int
    hashes: tuple[bytes, ...]
    disk_slots: tuple[int, ...]
    host_slots: tuple[int, ...]


TierJob = Save | Load | Spill | Fetch


@dataclass(frozen=True, slots=True)
class JobDone:
    """The end of a job. `bad` has the hashes of blocks that were not copied, and after a Fetch also of those whose
    bytes are not what was written."""

    job: TierJob
    seconds: float
    bad: tuple[bytes, ...] = ()


def with_loads(step_id: int, meta: StepMeta | None, loads: tuple[LayerLoad, ...]) -> StepMeta | None:
    """A step's metadata with what comes while it runs. Blocks that were complete before the step are then pushed behind
    it, since they may be the ones that come."""
    if not loads:
        return meta
    if meta is None:
        return StepMoves(step_id, loads=loads, is_pushed=False)
    assert isinstance(meta, StepMoves)
    whole = tuple(replace(push, step_id=step_id) for push in meta.whole)
    return StepMoves(step_id, meta.pushes, whole, (*meta.loads, *loads), is_pushed=meta.is_pushed)
