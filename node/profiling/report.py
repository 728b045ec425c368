"""The report of a profile that has ended, made beside serving on a thread of its own."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.autograd.profiler import profile

from tandem.engine.contracts.wire.profile import ProfiledMemory, ProfileReport, Timed
from tandem.engine.scheduling.turn_times import PARTS
from tandem.node.profiling.layer_times import LayerTimes
from tandem.node.profiling.trace import TraceFigures, read_trace

MAX_TRACE_BYTES = 32 << 20  # packed; a guess, far below what a control connection takes in one message
PACKED = 1  # gzip's fastest level: others wait for the same cores


@dataclass(frozen=True)
class ProfiledNode:
    """What a profile is of. `counters`: the node's; `num_steps`: the one of them that says how many steps were read,
    without the rest; `restart_turn`: has what the turn took so far count for no step. `is_rank`: others compute each
    step along with this process."""

    node_id: str
    role: str
    device: torch.device
    model: nn.Module
    attention: Mapping[str, nn.Module]
    kv_bytes: int
    replays_graphs: bool
    is_rank: bool
    counters: Callable[[], dict[str, float]]
    num_steps: Callable[[], float]
    restart_turn: Callable[[], None]


@dataclass(frozen=True)
class FinishedProfile:
    """What was measured: torch's profiler, the layers' times, counters at both ends. `allocated_bytes`: what lived on
    the GPU at first. `trouble`: why torch's profiler has nothing, or ""."""

    profiler: profile
    layers: LayerTimes | None
    seconds: float
    before: dict[str, float]
    after: dict[str, float]
    allocated_bytes: int
    trouble: str


def make_report(node: ProfiledNode, finished: FinishedProfile) -> tuple[bytes, bytes]:
    """(JSON of the ProfileReport, the trace). Both are bounded."""
    notes = _notes(node, finished)
    figures, trace = TraceFigures((), 0, 0.0, 0), b""
    if not finished.trouble:
        content = _trace_of(finished.profiler)
        figures, trace = read_trace(content), gzip.compress(content, PACKED)
    if len(trace) > MAX_TRACE_BYTES:
        notes.append(f"the trace has {len(trace) >> 20} MiB and is left out: profile fewer steps")
        trace = b""
    layers, attention = finished.layers.totals() if finished.layers is not None else ((), ())
    return msgspec.json.encode(_report(node, finished, figures, (layers, attention), notes)), trace


def _report(
    node: ProfiledNode,
    finished: FinishedProfile,
    figures: TraceFigures,
    times: tuple[tuple[Timed, ...], tuple[Timed, ...]],
    notes: list[str],
) -> ProfileReport:
    def passed(counter: str) -> float:
        return finished.after.get(counter, 0.0) - finished.before.get(counter, 0.0)

    steps, seconds = int(passed("steps_read")), finished.seconds
    a_step = 1 / max(1, steps)
    host = {part: passed(f"turn_{part}_s") for part in PARTS} | {"allocate": passed("allocate_s")}
    return ProfileReport(
        node_id=node.node_id,
        role=node.role,
        device=str(node.device),
        seconds=seconds,
        steps=steps,
        rows_a_step=passed("step_rows") * a_step,
        tokens_a_step=passed("step_tokens") * a_step,
        batch_fill=passed("batch_fill") * a_step,
        busy_share=min(1.0, passed("busy_s") / seconds),
        kernel_share=figures.kernel_s / seconds if node.device.type == "cuda" else None,
        launches=figures.launches,
        host_ms_a_step={part: value * 1e3 * a_step for part, value in host.items()},
        memory=_memory(node, finished, figures),
        layers=times[0],
        attention=times[1],
        kernels=figures.kernels,
        notes=tuple(notes),
    )


def _notes(node: ProfiledNode, finished: FinishedProfile) -> list[str]:
    notes = [finished.trouble] if finished.trouble else []
    if finished.layers is not None and node.replays_graphs:
        notes.append("steps ran eagerly, since graphs can't be cut by layer: the host's times are not those of serving")
    elif node.replays_graphs:
        notes.append("decode steps were replayed as graphs: there are no times by layer")
    if node.is_rank:
        notes.append("rank 0 of several was profiled, without times by layer")
    return notes


def _memory(node: ProfiledNode, finished: FinishedProfile, figures: TraceFigures) -> ProfiledMemory:
    weights = {weight.data_ptr(): weight.nbytes for weight in node.model.parameters()}
    peak, reserved, idle = figures.peak_bytes, 0, 0.0
    if node.device.type == "cuda":
        peak = max(0, torch.cuda.max_memory_allocated(node.device) - finished.allocated_bytes)
        reserved = torch.cuda.memory_reserved(node.device)
        idle = 1 - torch.cuda.memory_allocated(node.device) / max(1, reserved)
    return ProfiledMemory(
        weights_bytes=sum(weights.values()),
        kv_bytes=node.kv_bytes,
        kv_used_share=finished.after["kv_used_share"],
        kv_fragmentation=finished.after["kv_fragmentation"],
        activation_peak_bytes=peak,
        reserved_bytes=reserved,
        reserved_idle_share=idle,
    )


def _trace_of(profiler: profile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tandem-profile-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return path.read_bytes()
