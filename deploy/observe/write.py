"""Writes what is made of the list of metrics: `python -m tandem.deploy.observe.write`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from tandem.deploy.observe.dashboard import dashboard
from tandem.deploy.observe.names import MetricFamily, node_families, router_families

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "observe" / "alerts.yml"
_MADE = "<!-- made by `python -m tandem.deploy.observe.write` -->"


def alerts() -> list[dict[str, Any]]:
    """The alert rules, as Prometheus reads them."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def files() -> dict[Path, str]:
    """What each file must hold."""
    docs = ROOT / "docs"
    return {
        RULES.with_name("grafana.json"): json.dumps(dashboard(), indent=1) + "\n",
        docs / "alerts.md": _alerts_page(),
        docs / "metrics_list.md": _list_page(),
    }


def _alerts_page() -> str:
    """What each alert means, and what to do."""
    parts = [
        f"# Alerts\n\n{_MADE}\n\nThe rules in [`deploy/observe/alerts.yml`](../deploy/observe/alerts.yml), which "
        "Prometheus loads by `rule_files`.\nThresholds of latencies are guesses: put your own targets there.\n"
    ]
    for rule in alerts():
        notes = rule["annotations"]
        severity = rule["labels"]["severity"]
        parts.append(f"\n## {rule['alert']}\n\n*{severity}*. {notes['description']}\n\n**Do:** {notes['action']}\n")
    return "".join(parts)


def _list_page() -> str:
    head = ["# The list of metrics", "", _MADE, "", "Names, labels and counting: [metrics.md](metrics.md).", ""]
    return "\n".join([*head, *_table("Routers", router_families()), "", *_table("Nodes", node_families()), ""])


def _table(title: str, families: Iterable[MetricFamily]) -> list[str]:
    rows = [
        f"| `{family.name}{'_total' * (family.kind == 'counter')}` | {family.kind} | "
        f"{', '.join(f'`{label}`' for label in family.labels)} | {family.text} |"
        for family in families
    ]
    return [f"## {title}", "", "| metric | kind | labels | what it is |", "| --- | --- | --- | --- |", *rows]


def main() -> None:
    """Writes the files that differ, and says which."""
    for path, text in files().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
