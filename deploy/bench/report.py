"""A benchmark's report: a table for people, JSON for programs, a file for later."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.deploy.bench.load_picture import load_picture
from tandem.deploy.bench.request_times import RequestTimes
from tandem.deploy.explain import table
from tandem.engine.contracts.errors import ConfigError

_TIMES = {
    "ttft_s": "first token",
    "tpot_s": "each token after it",
    "itl_s": "gap between events",
    "e2e_s": "whole request",
}


def publish(
    report: Mapping[str, Any], arguments: argparse.Namespace, runs: Mapping[str, Sequence[RequestTimes]]
) -> None:
    """Prints a report, and writes it where --output says, a picture of its runs where --picture does. Raises
    ConfigError where that can't be written."""
    text = json.dumps(report, indent=2)
    files = {"output": lambda: text + "\n", "picture": lambda: load_picture(_title(report), runs)}
    for name, content in files.items():
        if path := getattr(arguments, name):
            try:
                Path(path).write_text(content())
            except OSError as error:
                print(text)  # what took minutes to measure is not thrown away
                raise ConfigError(f"can't write --{name} {path}: {error.strerror}") from None
    print(text if arguments.json else as_table(report))


def _title(report: Mapping[str, Any]) -> str:
    rates = f"{report['requests_per_s']:,} requests and {report['output_tokens_per_s']:,} output tokens a second"
    return f"{report['model']}: {rates} in {report['duration_s']:,.4g} s"


def as_table(report: Mapping[str, Any]) -> str:
    """The report for people: times in milliseconds, below them whatever else it has, a line each."""
    times = [(words, report[name]) for name, words in _TIMES.items() if report.get(name)]
    parts = []
    if times:
        columns = list(times[0][1])
        rows = [[words, *(f"{1e3 * measured[column]:,.1f}" for column in columns)] for words, measured in times]
        parts.append(table(["milliseconds", *columns], rows))
    rest = [(name, value) for name, value in report.items() if name not in _TIMES and value not in ([], {})]
    width = max(len(name) for name, _ in rest)
    parts.append("\n".join(f"{name.replace('_', ' '):{width}}  {_shown(value)}" for name, value in rest))
    return "\n\n".join(parts)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return "; ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
