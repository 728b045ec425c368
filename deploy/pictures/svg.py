"""Pictures as SVG: a canvas, and charts with axes on it. Lengths are pixels, from the top left."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2")
INK, PALE, GRID = "#222222", "#777777", "#dddddd"
LETTER = 6.6  # of a letter of 12 pixels, about, on average


class Svg:
    """A picture on white ground."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, *, anchor: str = "start", colour: str = INK, bold: bool = False
    ) -> None:
        """Writes `words`. `anchor`: start, middle or end of them is at `x`; `y` is their line."""
        weight = ' font-weight="bold"' * bold
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}"{weight}>{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>')

    def line(self, points: Iterable[tuple[float, float]], colour: str, width: float = 1.0, dashes: str = "") -> None:
        """A line through all points. `dashes`: lengths of dashes and gaps, as SVG takes them."""
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        style = f'stroke="{colour}" stroke-width="{width:g}"' + f' stroke-dasharray="{dashes}"' * bool(dashes)
        self._parts.append(f'<polyline points="{places}" fill="none" {style}/>')

    def dot(self, x: float, y: float, colour: str, radius: float = 2.5) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{colour}" fill-opacity="0.7"/>')

    def document(self, height: int) -> str:
        size = f'width="{self.width}" height="{height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width} {height}" '
            'font-family="sans-serif" font-size="12">'
        )
        return "\n".join([head, f'<rect {size} fill="white"/>', *self._parts, "</svg>\n"])


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high`. `unit`: "s" is shown in ms where that reads better, others as they are."""

    low: float
    high: float
    unit: str = ""
    is_log: bool = False

    def share(self, value: float) -> float:
        """Where a value is: 0 at `low`, 1 at `high`, and there for what is beyond."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        at = math.log(max(value, self.low)) if self.is_log else value
        return min(1.0, max(0.0, (at - low) / (high - low)))

    def ticks(self, most: int) -> list[float]:
        """Round values, at most about `most` of them."""
        if self.is_log:
            exponents = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for factors in ((1, 2, 5), (1, 3), (1,)):
                found = [f * 10.0**e for e in exponents for f in factors if self.low <= f * 10.0**e <= self.high]
                if len(found) <= most:
                    break
            return found
        raw = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(raw))
        step = next(f * power for f in (1, 2, 5, 10) if f * power >= raw * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [n * step for n in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def label(self, value: float) -> str:
        if self.unit == "s":
            return seconds(value)
        return f"{value:.0%}" if self.unit == "%" else f"{value:,.6g}{self.unit and ' ' + self.unit}"


class Chart:
    """A chart with a grid and axes, at a place of a picture."""

    def __init__(self, svg: Svg, left: int, top: int, width: int, height: int, x: Axis, y: Axis, title: str) -> None:
        self._svg, self._x, self._y = svg, x, y
        self._left, self._bottom, self._width, self._height = left, top + height, width, height
        svg.text(left, top - 10, title, bold=True)
        for value in y.ticks(5):
            at = self._place(x.low, value)[1]
            svg.line([(left, at), (left + width, at)], GRID)
            svg.text(left - 6, at + 4, y.label(value), anchor="end", colour=PALE)
        for value in x.ticks(max(2, width // 60)):
            at = self._place(value, y.low)[0]
            svg.line([(at, top), (at, self._bottom)], GRID)
            svg.text(at, self._bottom + 16, x.label(value), anchor="middle", colour=PALE)

    def line(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        self._svg.line([self._place(*point) for point in points], colour, 1.8)

    def dots(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        for point in points:
            self._svg.dot(*self._place(*point), colour)

    def note(self, words: Sequence[str]) -> None:
        """Lines in the corner at the bottom right, where what grows to the right leaves room."""
        for row, line in enumerate(reversed(words)):
            self._svg.text(self._left + self._width - 8, self._bottom - 10 - 18 * row, line, anchor="end")

    def _place(self, x: float, y: float) -> tuple[float, float]:
        return self._left + self._x.share(x) * self._width, self._bottom - self._y.share(y) * self._height


def seconds(value: float) -> str:
    """A time for people: 0.2 ms, 35 ms, 1.5 s."""
    if value == 0 or value >= 1:
        return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{1e3 * value:.3g} ms"


def span(values: Sequence[float], unit: str = "", *, is_log: bool = False) -> Axis:
    """An axis that holds all values: from 0, or a logarithmic one without the least hundredth of them."""
    if is_log:
        found = sorted(value for value in values if value > 0) or [1.0]
        return Axis(found[len(found) // 100] / 1.2, found[-1] * 1.2, unit, is_log=True)
    return Axis(0.0, max([*values, 0.0]) * 1.05 or 1.0, unit)
