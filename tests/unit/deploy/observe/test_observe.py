"""Alert rules, dashboard and the list of metrics: each name exists, and Prometheus' own tool takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from documented import blocks
from waiting import PATIENCE_S

from tandem.deploy.cli import main
from tandem.deploy.observe.names import asked_for, node_families, router_families, series
from tandem.deploy.observe.write import RULES, alerts, files
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.durations import note_duration
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.router.metrics.catalog import NODE_METRICS
from tandem.router.metrics.nodes import read_nodes
from tandem.router.metrics.router_metrics import FIGURES, RouterMetrics
from tandem.router.placing.view import NodeView

PROMTOOL = shutil.which("promtool")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def metrics_of_a_cluster() -> RouterMetrics:
    """Of a router with a node that reports all there is."""
    fields = set(Status.__struct_fields__)
    of_status = {metric.key: 3.0 for metric in NODE_METRICS if metric.key in fields}
    counters = {metric.key: 2.0 for metric in NODE_METRICS if metric.key not in fields}
    info = NodeInfo(node_id="d0", epoch=1, role="decode", model_name="m")
    status = Status(node_id="d0", epoch=1, counters={**counters, "of_tomorrow": 7.0}, **of_status)
    view = NodeView(info, status)
    return RouterMetrics(lambda: [view], lambda: dict.fromkeys(FIGURES, 1.0), lambda: "m")


def test_what_is_listed_is_shown() -> None:
    text = metrics_of_a_cluster().exposition().decode()
    shown = set(re.findall(r"^([\w:]+)[ {]", text, re.MULTILINE))
    unsaid = ("responses", "prompts_ended", "prompts_by_promise", "placements")  # families without a label so far
    of_labels = {f"tandem_router_{name}_total" for name in unsaid}
    assert series() - shown == of_labels
    assert shown - series() == {"tandem_node_unlisted"}


def test_durations_are_counted_in_buckets() -> None:
    counters: dict[str, float] = {}
    for seconds in (0.0004, 0.003, 0.003, 90.0):
        note_duration(counters, "step_s", seconds)
    view = NodeView(NodeInfo(node_id="d0", epoch=1, role="decode"), Status(node_id="d0", epoch=1, counters=counters))
    lines = RouterMetrics(lambda: [view]).exposition().decode().splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if line.startswith("tandem_node_step_seconds"))
    labels = 'node="d0",role="decode"'
    for bound, number in (("0.0001", "0.0"), ("0.0005", "1.0"), ("0.005", "3.0"), ("30.0", "3.0"), ("+Inf", "4.0")):
        assert told[f'tandem_node_step_seconds_bucket{{le="{bound}",{labels}}}'] == number
    assert told[f"tandem_node_step_seconds_count{{{labels}}}"] == "4.0"
    assert float(told[f"tandem_node_step_seconds_sum{{{labels}}}"]) == pytest.approx(90.0064)
    assert "tandem_node_unlisted" not in "\n".join(lines)


def test_what_is_shown_can_be_read_back() -> None:
    node = read_nodes(metrics_of_a_cluster().exposition().decode())["d0"]
    assert node.role == "decode"
    assert {metric.key for metric in NODE_METRICS} | {"of_tomorrow"} == node.figures.keys()
    assert (node.figures["num_running"], node.figures["tier_host_blocks"], node.figures["of_tomorrow"]) == (3, 2, 7)


def test_a_name_means_one_thing() -> None:
    assert len({metric.key for metric in NODE_METRICS}) == len(NODE_METRICS)
    assert len({(metric.family, metric.value) for metric in NODE_METRICS}) == len(NODE_METRICS)
    assert len({(metric.family, metric.kind, metric.text, metric.label) for metric in NODE_METRICS}) == len(
        {metric.family for metric in NODE_METRICS}
    )
    names = [family.name for family in (*router_families(), *node_families())]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", files(), ids=lambda path: path.name)
def test_made_files_are_as_they_would_be_made(path: Path) -> None:
    assert path.read_text() == files()[path], "run: python -m tandem.deploy.observe.write"


def test_alerts_ask_for_metrics_and_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help=all"])
    options = set(OPTION.findall(capsys.readouterr().out))
    for rule in alerts():
        asked = asked_for(rule["expr"])
        assert asked, rule["alert"]
        said = " ".join(rule["annotations"].values())
        assert asked | asked_for(said) <= series(), rule["alert"]
        assert set(OPTION.findall(said)) <= options, rule["alert"]
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{rule['alert'].lower()}"


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads(RULES.with_name("grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 30
    assert all(asked_for(query) and asked_for(query) <= series() for query in queries)
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_what_the_page_gives_to_prometheus_loads_the_rules() -> None:
    (block,) = blocks("yaml", "docs/metrics.md")
    assert [RULES.parents[2] / path for path in yaml.safe_load(block.text)["rule_files"]] == [RULES]


@pytest.mark.skipif(PROMTOOL is None, reason="promtool comes with Prometheus, which isn't installed")
def test_prometheus_takes_them(tmp_path: Path) -> None:
    def promtool(*command: str, stdin: bytes = b"") -> str:
        assert PROMTOOL is not None
        ran = subprocess.run([PROMTOOL, *command], input=stdin, capture_output=True, timeout=PATIENCE_S)
        return (ran.stdout + ran.stderr).decode()

    settings = tmp_path / "prometheus.yml"
    settings.write_text(blocks("yaml", "docs/metrics.md")[0].text.replace("deploy/", f"{RULES.parents[1]}/"))
    assert "SUCCESS" in promtool("check", "config", str(settings))
    assert "SUCCESS" in promtool("check", "rules", str(RULES))
    assert "SUCCESS" in promtool("test", "rules", str(RULES.with_name("alerts_test.yml")))
    complaints = promtool("check", "metrics", stdin=metrics_of_a_cluster().exposition()).splitlines()
    assert complaints, "vLLM's names have a colon"
    assert all(re.fullmatch(r"vllm:\w+ metric names should not contain ':'", complaint) for complaint in complaints)
