"""Summaries of many campaigns and memory soaks as Markdown tables, for docs/verification.md."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TextIO

Summaries = list[dict[str, Any]]
CAMPAIGN_COLUMNS = (
    "transport", "nodes", "kinds", "seeds", "moments struck", "requests", "equal", "clients that left", "honest errors",
    "connection lost", "refused", "wrong", "no end", "slowest", "broken promises",
)  # fmt: skip
MEMORY_COLUMNS = ("transport", "seed", "minutes", "requests", "process", "RSS in MB: first, third, end", "an hour", "")


def print_tables(paths: Iterable[Path]) -> None:
    summaries = [json.loads(line) for path in _files(paths) for line in path.read_text().splitlines()]
    campaigns = [each for each in summaries if "moments" in each]
    if campaigns:
        print_table(CAMPAIGN_COLUMNS, campaign_rows(campaigns))
        print_table(("moment", "times"), moment_rows(campaigns))
        print_failures(campaigns)
    soaks = [each for each in summaries if "verdicts" in each]
    if soaks:
        print_table(MEMORY_COLUMNS, memory_rows(soaks))


def _files(paths: Iterable[Path]) -> list[Path]:
    """A line of JSON a campaign: several runs' may stand in one file, and are added up."""
    return sorted(file for path in paths for file in (path.rglob("summary.json") if path.is_dir() else [path]))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]], file: TextIO | None = None) -> None:
    columns = list(columns)
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}", file=file)
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", file=file)
    print(file=file)


def campaign_rows(campaigns: Summaries) -> Iterable[list[object]]:
    """A row for each transport, number of nodes and choice of kinds."""
    groups: dict[tuple[str, str, str], Summaries] = defaultdict(list)
    for each in campaigns:
        groups[each["transport"], each["nodes"], each["kinds"]].append(each)
    for (transport, nodes, kinds), group in sorted(groups.items()):
        ends = sum((Counter(each["ends"]) for each in group), Counter[str]())
        honest = sum(count for end, count in ends.items() if end.isdigit() or end == "error in the stream")
        struck = sum(sum(each["struck"].values()) for each in group)
        yield [
            transport, nodes, kinds.replace(",", ", "), _ranges(each["seed"] for each in group), f"{struck:,}",
            f"{sum(each['requests'] for each in group):,}", f"{ends['equal']:,}", ends["left"], f"{honest:,}",
            f"{ends['connection']:,}", f"{ends['refused']:,}", ends["wrong"], ends["hung"],
            f"{max(each['slowest_s'] for each in group):g} s", sum(bool(each["failures"]) for each in group),
        ]  # fmt: skip


def moment_rows(campaigns: Summaries) -> Iterable[list[object]]:
    struck = sum((Counter(each["struck"]) for each in campaigns), Counter[str]())
    return [[name, count] for name, count in sorted(struck.items())]


def print_failures(campaigns: Summaries) -> None:
    for each in campaigns:
        for failure in each["failures"]:
            print(f"- {each['transport']}, seed {each['seed']}: {failure[:300]}")
    print()


def memory_rows(soaks: Summaries) -> Iterable[list[object]]:
    for soak in soaks:
        for each in soak["verdicts"]:
            if each["what"] == "rss":
                figures = " → ".join(f"{each[when] / 1e6:.0f}" for when in ("first", "middle", "last"))
                hourly = f"{each['an_hour'] / 1e6:+.0f} MB"
                start = [soak[name] for name in ("transport", "seed", "minutes", "requests")]
                yield [*start, each["process"], figures, hourly, each["verdict"]]


def _ranges(numbers: Iterable[int]) -> str:
    """1–3, 7"""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)
