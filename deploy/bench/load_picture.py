"""A benchmark as a picture: how first tokens and gaps are distributed, and tokens and first tokens over time. SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tandem.deploy.bench.request_times import PERCENTILES, RequestTimes, percentile
from tandem.deploy.pictures.svg import COLOURS, LETTER, PALE, Axis, Chart, Svg, seconds, span

WIDTH, HEIGHT = 970, 650  # of the picture
LEFT, ACROSS, TALL = 70, 390, 210  # of a chart: what its labels need, its width and height
MOST_POINTS = 400  # of a line
PERIODS = 60  # of time, in each of which tokens are counted


def load_picture(title: str, runs: Mapping[str, Sequence[RequestTimes]]) -> str:
    """The picture of runs by their names, each in a colour of its own. Failed requests count in none of the charts."""
    svg = Svg(WIDTH)
    svg.text(20, 28, title, bold=True)
    good = {name: [s for s in samples if not s.error and s.event_times] for name, samples in runs.items()}
    at = 20.0
    for index, (name, samples) in enumerate(good.items()):
        words = f"{name}: {len(samples):,} requests, {len(runs[name]) - len(samples):,} failed"
        svg.rect(at, 42, 10, 10, _colour(index))
        svg.text(at + 16, 52, words, colour=PALE)
        at += 40 + LETTER * len(words)
    firsts = {name: [s.ttft_s for s in samples] for name, samples in good.items()}
    gaps = {name: [gap for s in samples for gap in s.gaps_s] for name, samples in good.items()}
    _shares(svg, 0, 0, "Time to first token: share of requests", firsts)
    _shares(svg, 1, 0, "Gap between events of a stream: share of gaps", gaps)
    _rates(svg, good)
    _over_time(svg, good)
    return svg.document(HEIGHT)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _chart(svg: Svg, column: int, row: int, x: Axis, y: Axis, title: str) -> Chart:
    left, top = LEFT + column * (ACROSS + LEFT + 20), 100 + row * (TALL + 90)
    return Chart(svg, left, top, ACROSS, TALL, x, y, title)


def _shares(svg: Svg, column: int, row: int, title: str, runs: Mapping[str, Sequence[float]]) -> None:
    """Draws which share of all values was at most so large, a line for each run."""
    times = span([value for values in runs.values() for value in values], "s", is_log=True)
    chart = _chart(svg, column, row, times, Axis(0.0, 1.0, "%"), title)
    for index, values in enumerate(runs.values()):
        ordered = sorted(values)
        every = max(1, len(ordered) // MOST_POINTS)
        points = [(value, (n + 1) / len(ordered)) for n, value in enumerate(ordered) if n % every == 0]
        chart.line([*points, *((ordered[-1], 1.0) for _ in ordered[:1])], _colour(index))
        found = {percent: percentile(ordered, percent) for percent in PERCENTILES if ordered}
        chart.dots(((value, percent / 100) for percent, value in found.items()), _colour(index))
        if len(runs) == 1:
            chart.note([f"p{percent} {seconds(value)}" for percent, value in found.items()])


def _rates(svg: Svg, runs: Mapping[str, Sequence[RequestTimes]]) -> None:
    """Draws output tokens a second. A request's tokens are taken to have come in equal parts with each of its
    events."""
    rates, lasts = [], [0.0]
    for samples in runs.values():
        began = _began(samples)
        lasts.append(max((s.ended_at for s in samples), default=began) - began)
        period = lasts[-1] / PERIODS or 1.0
        counts = [0.0] * (PERIODS + 1)
        for sample in samples:
            for at in sample.event_times:
                counts[math.floor((at - began) / period)] += sample.num_tokens / len(sample.event_times)
        rates.append([((n + 0.5) * period, count / period) for n, count in enumerate(counts[:PERIODS])])
    highest = span([rate for points in rates for _, rate in points])
    chart = _chart(svg, 0, 1, span(lasts, "s"), highest, "Output tokens a second, over time")
    for index, points in enumerate(rates):
        chart.line(points, _colour(index))


def _over_time(svg: Svg, runs: Mapping[str, Sequence[RequestTimes]]) -> None:
    points = {name: [(s.sent_at - _began(samples), s.ttft_s) for s in samples] for name, samples in runs.items()}
    sent, firsts = (
        zip(*(p for each in points.values() for p in each), strict=True) if any(points.values()) else ((), ())
    )
    chart = _chart(svg, 1, 1, span(sent, "s"), span(firsts, "s"), "Time to first token, by when a request was sent")
    for index, each in enumerate(points.values()):
        every = max(1, len(each) // MOST_POINTS)
        chart.dots(each[::every], _colour(index))


def _began(samples: Sequence[RequestTimes]) -> float:
    return min((sample.sent_at for sample in samples), default=0.0)
