"""Profiles of nodes: what routers ask, what nodes answer, and the report."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from tandem.engine.contracts.wire.parts import Message

MAX_STEPS, MAX_SECONDS = 256, 60.0  # guesses: a trace of so many steps of a large model can still be sent and opened


class StartProfile(Message, frozen=True, kw_only=True):
    """Router -> node: profile the next steps, until so many, or so many seconds, are over. Answered by Profiled,
    without a report. Sent once: whoever asked is told when no answer comes."""

    ask: str  # comes back with the answer
    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)]
    seconds: Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
    by_layer: bool = True


class StopProfile(Message, frozen=True, kw_only=True):
    """Router -> node: end the profile, if it still runs, and send its report. Answered by Profiled."""

    ask: str


class Profiled(Message, frozen=True, kw_only=True):
    """Answer to StartProfile and StopProfile. `error`: why there is no profile, for people."""

    ask: str
    error: str = ""
    report: bytes = b""  # JSON of a ProfileReport
    trace: bytes = b""  # gzip of Chrome's trace format; empty if it was too large


class Timed(msgspec.Struct, frozen=True):
    """What was called so many times and took so many milliseconds in all."""

    name: str
    calls: int
    ms: float


class ProfiledMemory(msgspec.Struct, frozen=True):
    """Memory of a node in bytes, and shares of it. `reserved`: what torch holds of a GPU, in `reserved_idle_share` of
    which nothing lives."""

    weights_bytes: int
    kv_bytes: int
    kv_used_share: float
    kv_fragmentation: float
    activation_peak_bytes: int
    reserved_bytes: int = 0
    reserved_idle_share: float = 0.0


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a node did in the profiled steps. Times by layer and kernel are sums over all of them; `kernel_share` is the
    share of the time in which a GPU had a kernel to run, None on a CPU."""

    node_id: str
    role: str
    device: str
    seconds: float
    steps: int
    rows_a_step: float
    tokens_a_step: float
    batch_fill: float
    busy_share: float
    kernel_share: float | None
    launches: int
    host_ms_a_step: dict[str, float]
    memory: ProfiledMemory
    layers: tuple[Timed, ...]
    attention: tuple[Timed, ...]
    kernels: tuple[Timed, ...]
    notes: tuple[str, ...] = ()
