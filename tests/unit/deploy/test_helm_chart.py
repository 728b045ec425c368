"""The Helm chart: its objects have Kubernetes' schemas, start commands that there are, go by metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart_renderer import RequiredValueError, render_chart
from waiting import PATIENCE_S

from tandem.deploy.cli import make_parser
from tandem.deploy.options import KNOWN_NAMES
from tandem.router.metrics.catalog import NODE_METRICS

ROOT = Path(__file__).resolve().parents[3]
CHART = ROOT / "deploy" / "helm" / "tandem"
VERSION = "1.31"
KEY = {"clusterSecret": {"value": "00" * 32}}
SCALED = {"autoscaling": {"enabled": True}}
FULL = {
    **KEY,
    "model": "/models/Qwen3-8B",
    "modelVolume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    "huggingFaceTokenSecret": "hub",
    "apiKeysSecret": "clients",
    "imagePullSecrets": [{"name": "registry"}],
    "args": ["--max-model-len", "32k"],
    "router": {"nodeWaitSeconds": 60, "args": ["--placement", "prefix_aware"], "tolerations": [{"operator": "Exists"}]},
    "pools": {
        "prefill": {**SCALED, "args": ["--tensor-parallel-size", "2"], "nodeSelector": {"gpu": "h200"}},
        "decode": {**SCALED, "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}},
    },
    "redis": {"enabled": False, "urlSecret": "redis"},
    "networkPolicy": {"routerFrom": [{"namespaceSelector": {"matchLabels": {"name": "apps"}}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
}
SETTINGS = {"least": KEY, "full": FULL, "other key": {"clusterSecret": {"existingSecret": "mine"}}}


def objects(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for found in render_chart(CHART, values).values() for each in found]


def by_kind(values: dict[str, Any], kind: str) -> dict[str, Any]:
    return {each["metadata"]["name"]: each for each in objects(values) if each["kind"] == kind}


def container(deployment: dict[str, Any]) -> Any:
    return deployment["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
def test_objects_have_kubernetes_schemas(values: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for each in objects(values):
        if "." not in each["apiVersion"].partition("/")[0] or each["apiVersion"].startswith(("policy", "networking")):
            validate.validate(each, VERSION, strict=True)
        else:
            assert each["kind"] in ("ScaledObject", "ServiceMonitor"), "others have no schema here"


@pytest.mark.skipif(shutil.which("helm") is None, reason="there is no helm here")
@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
def test_helm_renders_the_same(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    command = ["helm", "template", "demo", str(CHART), "--values", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout
    assert sorted(filter(None, yaml.safe_load_all(said)), key=str) == sorted(objects(values), key=str)


def test_without_a_key_it_is_refused() -> None:
    with pytest.raises(RequiredValueError, match="openssl rand"):
        objects({})
    with pytest.raises(RequiredValueError, match=r"redis\.urlSecret"):
        objects({**KEY, "redis": {"enabled": False}})


def test_a_router_that_holds_requests_gets_some_without_nodes() -> None:
    for values, path in ((KEY, "/ready"), (FULL, "/health")):
        router = container(by_kind(values, "Deployment")["demo-router"])
        assert router["readinessProbe"]["httpGet"]["path"] == path


@pytest.mark.parametrize("values", SETTINGS.values(), ids=SETTINGS)
def test_every_container_starts_a_command_with_options_that_there_are(values: dict[str, Any]) -> None:
    found = [container(each) for each in objects(values) if each["kind"] == "Deployment"]
    ours = [each for each in found if each["name"] != "redis"]
    assert {each["args"][0] for each in ours} == {"router", "prefill", "decode"}
    for each in ours:
        make_parser().parse_args([word.replace("$(POD_IP)", "10.0.0.1") for word in each["args"]])
        named = {env["name"] for env in each["env"]}
        assert {name.removeprefix("TANDEM_").lower() for name in named if name.startswith("TANDEM_")} <= KNOWN_NAMES
        assert {"TANDEM_REDIS_URL", "TANDEM_CLUSTER_SECRET_FILE"} <= named
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert "cluster-key" in mounted
    for each in objects(values):
        if each["kind"] == "Deployment" and each["metadata"]["name"] != "demo-redis":
            pod = each["spec"]["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes
            drain_s = {env["name"]: env.get("value") for env in pod["containers"][0]["env"]}["TANDEM_DRAIN_S"]
            assert pod["terminationGracePeriodSeconds"] > float(drain_s) + 30, "or pods are killed while they drain"


def test_selectors_find_the_pods_that_they_mean() -> None:
    pods = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in by_kind(FULL, "Deployment").items()}

    def selected(labels: dict[str, str]) -> set[str]:
        return {name for name, has in pods.items() if labels.items() <= has.items()}

    for name, each in by_kind(FULL, "PodDisruptionBudget").items():
        assert selected(each["spec"]["selector"]["matchLabels"]) == {name}
    assert selected(by_kind(FULL, "Service")["demo-router"]["spec"]["selector"]) == {"demo-router"}
    nodes = by_kind(FULL, "NetworkPolicy")["demo-nodes"]["spec"]
    assert selected(nodes["podSelector"]["matchLabels"]) == {"demo-prefill", "demo-decode"}
    peers = [source["podSelector"]["matchLabels"] for rule in nodes["ingress"] for source in rule["from"]]
    assert [selected(labels) for labels in peers] == [{"demo-router"}, {"demo-prefill", "demo-decode"}]


def test_pools_are_scaled_by_metrics_that_nodes_report() -> None:
    scaled = by_kind(FULL, "ScaledObject")
    assert set(scaled) == {"demo-prefill", "demo-decode"}
    series = {metric.series for metric in NODE_METRICS}
    for name, each in scaled.items():
        assert "replicas" not in by_kind(FULL, "Deployment")[name]["spec"], "two would decide"
        for trigger in each["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert set(re.findall(r"(?:tandem|vllm)[\w:]+", query)) <= series, query
            assert f'role="{name.removeprefix("demo-")}"' in query
            assert float(trigger["metadata"]["threshold"]) > 0
    assert by_kind(KEY, "ScaledObject") == {}
