"""A request's story as a picture: a row for each moment, at its time after the request came. SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.deploy.pictures.svg import COLOURS, GRID, INK, PALE, Axis, Svg, seconds

WIDTH, WORDS, BARS, RIGHT = 1240, 160, 540, 110  # of the picture; where words and bars begin; right of the bars
LINE, BAR = 20, 12  # of a row, of a bar
MOST_LETTERS, MOST_NAME = 60, 22  # of what a row says, of a node's name
MOST_ROWS = 200  # of a prompt
CUT = 3.0  # tokens that take so many times as long as all before them are drawn cut off; a guess


def waterfall(prompts: Sequence[Mapping[str, Any]]) -> str:
    """The prompts of a request, as `GET /admin/requests/NAME` tells them, below each other."""
    svg, top = Svg(WIDTH), 10
    for prompt in prompts:
        top = _one(svg, prompt, top) + LINE
    return svg.document(top)


def _one(svg: Svg, prompt: Mapping[str, Any], top: int) -> int:
    """Draws one prompt below `top`, and says where it ends."""
    output = "" if prompt["output_tokens"] is None else f", {prompt['output_tokens']:,} output tokens"
    svg.text(20, top + LINE, f"{prompt['id']}: {prompt['state']}", bold=True)
    facts = f"{prompt['prompt_tokens']:,} prompt tokens ({prompt['cached_tokens']:,} cached){output}"
    firsts = [f"{name} {seconds(prompt[key])}" for name, key in _TIMES if prompt[key] is not None]
    svg.text(20, top + 2 * LINE, "; ".join([facts, *firsts]), colour=PALE)
    moments = prompt["moments"][:MOST_ROWS]
    axis = Axis(0.0, _end(moments), "s")
    colours = dict(zip(dict.fromkeys(m["where"] for m in moments if m["where"] != "router"), COLOURS * 9, strict=False))
    first, bottom = top + 3 * LINE, top + (4 + len(moments)) * LINE
    for value in axis.ticks(8):
        at = _at(axis, value)
        svg.line([(at, first + 6), (at, bottom)], GRID)
        svg.text(at, first, axis.label(value), anchor="middle", colour=PALE)
    for row, moment in enumerate(moments, 1):
        _row(svg, moment, first + row * LINE, axis, colours.get(moment["where"], PALE))
    return bottom


_TIMES = (("first token after", "ttft_s"), ("each further one", "tpot_s"), ("in all", "duration_s"))


def _row(svg: Svg, moment: Mapping[str, Any], bottom: int, axis: Axis, colour: str) -> None:
    begin, lasts, words = moment["at_s"], moment["lasts_s"], moment["text"]
    svg.text(20, bottom, moment["where"][-MOST_NAME:], colour=colour)
    svg.text(WORDS, bottom, words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 1]}…", colour=INK)
    left, right = _at(axis, begin), _at(axis, begin + lasts)
    if not lasts:
        svg.dot(left, bottom - BAR / 2 + 2, colour, 3.5)
        said = seconds(begin)
    else:
        svg.rect(left, bottom - BAR + 2, max(1.5, right - left), BAR, colour)
        said = f"{seconds(lasts)}{' →' * (begin + lasts > axis.high)}"
    svg.text(right + 8, bottom, said, colour=PALE)


def _end(moments: Sequence[Mapping[str, Any]]) -> float:
    """The end of the axis: that of all moments, or less where the tokens alone take nearly all of it."""
    ends = [m["at_s"] + m["lasts_s"] for m in moments]
    before = [end for m, end in zip(moments, ends, strict=True) if m["kind"] not in ("tokens", "end")]
    last, rest = max(ends, default=0.0), max(before, default=0.0)
    return (rest * CUT if 0 < rest * CUT < last else last) or 1e-3


def _at(axis: Axis, value: float) -> float:
    return BARS + axis.share(value) * (WIDTH - BARS - RIGHT)
