"""Draws one hand-off from what nodes wrote with `--handoff-trace FOLDER`: compute and push of each layer, then commit.

    python benchmarks/handoff_timeline.py FOLDER PICTURE.svg

Of the requests in the folder it takes the last one that was committed. Above all of it, below its end enlarged.
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 1200, 90, 20
LANE, GAP, HEADER = 30, 12, 132
MESSAGES = {  # stage -> (of the source's node?, what the picture calls it)
    "sent KVClaim": (True, "claim"),
    "received KVGrant": (True, "grant"),
    "sent Tokens": (None, ""),
    "sent KVReady": (True, "ready sent"),
    "received KVReady": (False, "ready"),
    "verified": (False, "verified"),
    "sent KVCommitted": (False, "committed"),
}
COLOURS = {"compute": "#4477aa", "push": "#ee8866", "commit": "#228833"}


@dataclass(frozen=True)
class Box:
    """A labelled stretch of time in one lane of the picture, in seconds."""

    lane: str
    begin: float
    end: float
    label: str


@dataclass(frozen=True)
class Handoff:
    """Times in ms from its first event."""

    request: str
    boxes: Sequence[Box]
    marks: Sequence[tuple[float, str]]
    nbytes: float

    @property
    def end(self) -> float:
        return max([t for t, _ in self.marks] + [box.end for box in self.boxes])

    def mark(self, label: str) -> float:
        """When `label` happened, in ms; NaN when it did not."""
        return next((t for t, name in self.marks if name == label), float("nan"))


def read_folder(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: line["t"])


def handoffs(lines: Sequence[dict[str, Any]]) -> list[Handoff]:
    """The hand-offs that were committed, in order of their commit."""
    by_request: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for line in lines:
        if not line["request"] or line["stage"] == "received Submit":
            continue
        by_request.setdefault((line["request"], line["attempt"]), []).append(line)
    committed = [own for own in by_request.values() if any(line["stage"] == "sent KVCommitted" for line in own)]
    committed.sort(key=lambda own: own[-1]["t"])
    return [_handoff(own) for own in committed]


def _handoff(lines: Sequence[dict[str, Any]]) -> Handoff:
    source = next(line["node"] for line in lines if line["stage"] in ("sent KVClaim", "sent KVReady"))
    zero = min(line.get("begin", line["t"]) for line in lines)
    computed = sorted(line["t"] for line in lines if line["stage"] == "computed")
    boxes, marks = [], []

    def ms(t: float) -> float:
        return 1e3 * (t - zero)

    layers = sorted((line for line in lines if line["stage"] == "computed"), key=lambda line: line["t"])
    for before, line in zip([zero, *computed], layers, strict=False):
        boxes.append(Box("compute", ms(before), ms(line["t"]), str(line["layer"])))
    pushes = [line for line in lines if line["stage"] == "pushed"]
    for line in pushes:
        layer, last = line["layer"], line.get("last_layer", line["layer"])
        label = "whole" if layer < 0 else str(layer) if last == layer else f"{layer}–{last}"
        boxes.append(Box("push", ms(line["begin"]), ms(line["t"]), label))
    for line in lines:
        if line["stage"] in MESSAGES:
            at_source, label = MESSAGES[line["stage"]]
            if at_source is None:
                label = "first token" if line["node"] == source else "second token"
            elif (line["node"] == source) != at_source:
                continue
            marks.append((ms(line["t"]), label))
    handoff = Handoff(lines[0]["request"], boxes, marks, sum(line["nbytes"] for line in pushes))
    ready, verified, committed = (handoff.mark(name) for name in ("ready", "verified", "committed"))
    ends = [Box("commit", ready, verified, "digests"), Box("commit", verified, committed, "commit")]
    ends.append(Box("commit", committed, handoff.mark("second token"), "next step"))
    return Handoff(handoff.request, [*boxes, *(box for box in ends if box.end >= box.begin)], marks, handoff.nbytes)


def draw(handoff: Handoff) -> str:
    """The picture of a hand-off, as SVG."""
    last_push = max((box.begin for box in handoff.boxes if box.lane == "push"), default=0.0)
    height = 2 * (HEADER + len(COLOURS) * (LANE + GAP)) + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="16" font-size="13">{html.escape(handoff.request)}: {handoff.nbytes / 2**20:.0f} MiB, '
        f"{handoff.end:.1f} ms</text>",
        *_panel(handoff, 20, 0.0, handoff.end),
        *_panel(handoff, 20 + height // 2, max(0.0, last_push - 0.02 * handoff.end), handoff.end),
        "</svg>",
    ]
    return "\n".join(parts)


def _panel(handoff: Handoff, top: int, begin: float, end: float) -> list[str]:
    scale = (WIDTH - LEFT - RIGHT) / max(end - begin, 1e-6)

    def x(t: float) -> float:
        return LEFT + (min(max(t, begin), end) - begin) * scale

    lanes = {lane: top + HEADER - 12 + index * (LANE + GAP) for index, lane in enumerate(COLOURS)}
    bottom = max(lanes.values()) + LANE
    parts = [f'<text x="10" y="{y + LANE / 2 + 4}">{lane}</text>' for lane, y in lanes.items()]
    for box in handoff.boxes:
        if box.end <= begin:
            continue
        left, width, y = x(box.begin), max(x(box.end) - x(box.begin), 0.7), lanes[box.lane]
        colour = COLOURS[box.lane]
        parts.append(
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{colour}" stroke="white" '
            f'stroke-width="0.4"><title>{box.label}: {box.begin:.2f} to {box.end:.2f} ms</title></rect>'
        )
        if width > 7 * len(box.label) + 2:
            middle = left + width / 2
            parts.append(
                f'<text x="{middle:.1f}" y="{y + LANE / 2 + 4}" fill="white" text-anchor="middle">{box.label}</text>'
            )
    level, taken = 0, -1e9
    for t, label in sorted(handoff.marks):
        if t < begin:
            continue
        place = x(t)
        level = (level + 1) % 7 if place - taken < 110 else 0
        taken, y = place, top + 14 + 13 * level
        anchor, text_x = ("end", place - 3) if place > WIDTH - 160 else ("start", place + 3)
        parts.append(
            f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{y - 8}" y2="{bottom}" stroke="#888" stroke-width="0.6"/>'
            f'<text x="{text_x:.1f}" y="{y}" text-anchor="{anchor}">{label} {t:.2f}</text>'
        )
    parts.append(f'<text x="{LEFT}" y="{bottom + 14}">{begin:.1f} ms</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 14}" text-anchor="end">{end:.1f} ms</text>')
    return parts


def summary(handoff: Handoff) -> str:
    """One line: how long after the first token each stage of the end came."""
    first = handoff.mark("first token")
    last_push = max((box.end for box in handoff.boxes if box.lane == "push"), default=float("nan"))
    stages = [("last push", last_push)]
    stages += [(name, handoff.mark(name)) for name in ("ready sent", "ready", "verified", "committed", "second token")]
    after = ", ".join(f"{name} {t - first:+.2f}" for name, t in stages)
    return f"ms after the first token left: {after}; {handoff.nbytes / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    found = handoffs(read_folder(options.folder))
    if not found:
        raise SystemExit(f"no hand-off in {options.folder} was committed")
    options.picture.write_text(draw(found[-1]))
    print(summary(found[-1]))


if __name__ == "__main__":
    main()
