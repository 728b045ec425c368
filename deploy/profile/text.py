"""A profile as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.deploy.explain import table
from tandem.engine.contracts.wire.profile import ProfileReport, Timed

MOST_KERNELS = 15  # lines of a table; the rest is in the JSON
MOST_LETTERS = 60  # of a kernel's name


def text(report: ProfileReport) -> str:
    """The whole report, a table below the other, in lines of a terminal's width."""
    blocks = [_summary(report), _host(report), _memory(report)]
    if report.layers:
        blocks.append(_layers(report))
    if report.kernels:
        total = sum(kernel.ms for kernel in report.kernels)
        kind = "operator" if report.kernel_share is None else "kernel"
        rows = [_kernel_row(kernel, report.steps, total) for kernel in report.kernels[:MOST_KERNELS]]
        blocks.append(table([kind, "calls", "ms a step", "share"], rows))
    return "\n\n".join([*blocks, *(f"note: {note}" for note in report.notes)])


def _summary(report: ProfileReport) -> str:
    rows, tokens = f"{report.rows_a_step:.1f} rows", f"{report.tokens_a_step:.1f} tokens"
    use = "" if report.kernel_share is None else f", with a kernel {report.kernel_share:.0%}"
    return (
        f"{report.node_id} ({report.role}, {report.device}): {report.steps} steps in {report.seconds:.2f} s\n"
        f"batch: {rows} and {tokens} a step, {report.batch_fill:.0%} full\n"
        f"device: busy {report.busy_share:.0%} of the time{use}; {report.launches / max(1, report.steps):.0f} "
        f"{'operators' if report.kernel_share is None else 'launches'} a step"
    )


def _host(report: ProfileReport) -> str:
    return table(["host", "ms a step"], [[part, f"{ms:.3f}"] for part, ms in report.host_ms_a_step.items()])


def _memory(report: ProfileReport) -> str:
    memory = report.memory
    rows = [
        ["weights", mib(memory.weights_bytes), ""],
        ["KV", mib(memory.kv_bytes), f"{memory.kv_used_share:.0%} used, {memory.kv_fragmentation:.0%} of that empty"],
        ["activations, peak", mib(memory.activation_peak_bytes), ""],
    ]
    if memory.reserved_bytes:
        rows.append(["torch's, reserved", mib(memory.reserved_bytes), f"{memory.reserved_idle_share:.0%} idle"])
    return table(["memory", "MiB", ""], rows)


def _layers(report: ProfileReport) -> str:
    attention: Sequence[Timed | None] = report.attention
    if len(report.attention) != len(report.layers):
        attention = [None] * len(report.layers)
    rows = [
        [layer.name, str(layer.calls), _ms_a_call(layer), _ms_a_call(own)]
        for layer, own in zip(report.layers, attention, strict=True)
    ]
    return table(["layer", "calls", "ms a call", "attention"], rows)


def _ms_a_call(timed: Timed | None) -> str:
    return "" if timed is None else f"{timed.ms / timed.calls:.3f}"


def _kernel_row(kernel: Timed, steps: int, total: float) -> list[str]:
    share = kernel.ms / total if total else 0.0
    return [kernel.name[:MOST_LETTERS], str(kernel.calls), f"{kernel.ms / max(1, steps):.3f}", f"{share:.0%}"]


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):,.1f}"
