"""What a report says of kernels, read from a trace in Chrome's format as torch.profiler writes it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from tandem.engine.contracts.wire.profile import Timed

ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
MOST_KERNELS = 40  # those that take the most time; a guess
CPU = 0  # torch's number for that type of device


class TraceEvent(msgspec.Struct):
    """An event of a trace; times in microseconds. Other fields are left out."""

    ph: str
    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    traceEvents: list[TraceEvent]


class _Allocation(msgspec.Struct, rename={"total": "Total Allocated", "device": "Device Type"}):
    total: int = 0
    device: int = CPU


@dataclass(frozen=True)
class TraceFigures:
    """What a trace adds up to. `kernels`: those of a GPU, or a CPU's operators without what they call. `kernel_s`: the
    time in which at least one ran on the GPU. `peak_bytes`: the most that the CPU had allocated at once, of what was
    allocated meanwhile."""

    kernels: tuple[Timed, ...]
    launches: int
    kernel_s: float
    peak_bytes: int


def read_trace(content: bytes) -> TraceFigures:
    """The figures of a trace. Raises msgspec.ValidationError for what is none."""
    events = msgspec.json.decode(content, type=_Trace).traceEvents
    complete = [event for event in events if event.ph == "X"]
    on_device = [event for event in complete if event.cat in ON_DEVICE]
    operators = [event for event in complete if event.cat == "cpu_op"]
    times = ((event.name, event.dur) for event in on_device) if on_device else _own_times(operators)
    launches = sum(event.cat.startswith("cuda_") and "Launch" in event.name for event in complete)
    changes = [msgspec.json.decode(event.args, type=_Allocation) for event in events if event.name == "[memory]"]
    peak = max((change.total for change in changes if change.device == CPU), default=0)
    return TraceFigures(_by_name(times), launches or len(operators), _covered(on_device) / 1e6, peak)


def _by_name(times: Iterable[tuple[str, float]]) -> tuple[Timed, ...]:
    calls: defaultdict[str, int] = defaultdict(int)
    total: defaultdict[str, float] = defaultdict(float)
    for name, microseconds in times:
        calls[name] += 1
        total[name] += microseconds
    largest = sorted(total, key=lambda name: -total[name])[:MOST_KERNELS]
    return tuple(Timed(name, calls[name], total[name] / 1e3) for name in largest)


def _own_times(events: list[TraceEvent]) -> Iterator[tuple[str, float]]:
    """The time of each event without that of the events within it, on its thread."""
    open_by_thread: defaultdict[int | str, list[tuple[TraceEvent, list[float]]]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.ts, -event.dur)):
        stack = open_by_thread[event.tid]
        while stack and stack[-1][0].ts + stack[-1][0].dur <= event.ts:
            ended, inner = stack.pop()
            yield ended.name, max(0.0, ended.dur - sum(inner))
        if stack:
            stack[-1][1].append(event.dur)
        stack.append((event, []))
    for stack in open_by_thread.values():
        for ended, inner in stack:
            yield ended.name, max(0.0, ended.dur - sum(inner))


def _covered(events: list[TraceEvent]) -> float:
    """The length of the union of events' intervals, in microseconds."""
    covered, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.ts):
        covered += max(0.0, event.ts + event.dur - max(end, event.ts))
        end = max(end, event.ts + event.dur)
    return covered
