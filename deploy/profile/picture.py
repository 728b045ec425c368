"""A profile as a picture: bars for the host's parts, the layers with the attention in them, and the kernels. SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tandem.deploy.pictures.svg import COLOURS, Svg
from tandem.engine.contracts.wire.profile import ProfileReport

WIDTH, LEFT, LINE, BAR = 900, 330, 18, 12  # pixels: of the picture, left of the bars, of a line, of a bar
MOST_BARS = 100  # of one chart
MOST_LETTERS = 48  # of a label, which LEFT has room for
PLAIN, INNER = COLOURS[:2]


class Bar(NamedTuple):
    """A bar of `ms`, of which the first `inner_ms` are coloured otherwise."""

    label: str
    ms: float
    inner_ms: float = 0.0


def picture(report: ProfileReport) -> str:
    """The report as a document of SVG."""
    title = f"{report.node_id} ({report.role}, {report.device}): {report.steps} steps in {report.seconds:.2f} s"
    charts = [("host, ms a step", [Bar(part, ms) for part, ms in report.host_ms_a_step.items()])]
    if report.layers:
        charts.append(("layers, ms a call (orange: attention)", _layers(report)))
    a_step = 1 / max(1, report.steps)
    kernels = [Bar(kernel.name, kernel.ms * a_step) for kernel in report.kernels]
    charts.append(("operators, ms a step" if report.kernel_share is None else "kernels, ms a step", kernels))
    svg = Svg(WIDTH)
    svg.text(10, LINE, title, bold=True)
    y = 2 * LINE
    for name, bars in charts:
        svg.text(10, y + LINE, name, bold=True)
        _chart(svg, bars[:MOST_BARS], y + LINE)
        y += (len(bars[:MOST_BARS]) + 2) * LINE
    return svg.document(y)


def _layers(report: ProfileReport) -> list[Bar]:
    attention = {index: timed.ms / timed.calls for index, timed in enumerate(report.attention)}
    if len(attention) != len(report.layers):
        attention = {}
    return [
        Bar(layer.name, layer.ms / layer.calls, attention.get(index, 0.0)) for index, layer in enumerate(report.layers)
    ]


def _chart(svg: Svg, bars: Sequence[Bar], y: int) -> None:
    longest = max((bar.ms for bar in bars), default=0.0) or 1.0
    scale = (WIDTH - LEFT - 80) / longest
    for index, bar in enumerate(bars, 1):
        top = y + index * LINE
        svg.text(10, top, bar.label[:MOST_LETTERS])
        svg.rect(LEFT, top - BAR + 2, bar.ms * scale, BAR, PLAIN)
        if bar.inner_ms:
            svg.rect(LEFT, top - BAR + 2, min(bar.inner_ms, bar.ms) * scale, BAR, INNER)
        svg.text(LEFT + bar.ms * scale + 6, top, f"{bar.ms:.3f}")
