"""What the tier manager (step loop) and the threads that copy tell each other. Frozen plain data, no torch.

Slots are of the host pool or the disk file, blocks of the device pool. Each job is answered by one event that names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem.engine.scheduling.step import StepMeta
from tandem.kv_connector.protocol.jobs import LayerLoad, StepMoves


@dataclass(frozen=True, slots=True)
class Save:
    """Device to host. What is read may change meanwhile; the manager finds out (`generations`)."""

    hashes: tuple[bytes, ...]
    block_ids: tuple[int, ...]
    host_slots: tuple[int, ...]
    generations: tuple[int, ...]
    flushes: int  # how often the tiers had been flushed when it was asked for


@dataclass(frozen=True, slots=True)
class Load:
    """Host to device, into blocks that are the manager's."""

    number: int
    hashes: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Spill:
    """Host to disk, with the records that find the blocks again after a restart."""

    hashes: tuple[bytes, ...]
    parents: tuple[bytes | None, ...]
    tenants: tuple[bytes, ...]
    host_slots: tuple[int, ...]
    disk_slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Disk to host; each block is checked by its digest."""

    number: int
    hashes: tuple[bytes, ...]
    disk_slots: tuple[int, ...]
    host_slots: tuple[int, ...]


TierJob = Save | Load | Spill | Fetch


@dataclass(frozen=True, slots=True)
class JobDone:
    """`bad`: hashes of blocks that were not copied; of a Fetch also those whose bytes are not what was written."""

    job: TierJob
    seconds: float
    bad: tuple[bytes, ...] = ()


def with_loads(step_id: int, meta: StepMeta | None, loads: tuple[LayerLoad, ...]) -> StepMeta | None:
    """A step's metadata with loads. What was complete before the step is pushed after it: it may be what is being
    loaded."""
    if not loads:
        return meta
    if meta is None:
        return StepMoves(step_id, loads=loads, is_pushed=False)
    assert isinstance(meta, StepMoves)
    whole = tuple(replace(push, step_id=step_id) for push in meta.whole)
    return StepMoves(step_id, meta.pushes, whole, loads)
