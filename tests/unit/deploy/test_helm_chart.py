"""The Helm chart: its objects have Kubernetes' schemas, start commands that there are, go by metrics that there are."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from chart_renderer import RequiredValueError, render_chart
from documented import blocks
from waiting import PATIENCE_S

from tandem.deploy.cli import SCALE_OPTIONS, filled, make_parser
from tandem.deploy.observe.names import asked_for, series
from tandem.deploy.options import KNOWN_NAMES
from tandem.deploy.scale.command import pools_of
from tandem.deploy.scale.pools import Bounds

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
SCALER = {**FULL, "autoscaling": {"by": "tandem", "scaler": {"args": ["--dry-run"]}}}
SETTINGS = {
    "least": KEY,
    "full": FULL,
    "scaler": SCALER,
    "other key": {"clusterSecret": {"existingSecret": "mine"}, "autoscaling": {"by": "tandem"}},
}


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
        if "." not in each["apiVersion"].partition("/")[0] or each["apiVersion"].startswith(
            ("policy", "networking", "rbac")
        ):
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
    ours = [each for each in found if each["name"] not in ("redis", "scaler")]
    assert {each["args"][0] for each in ours} == {"router", "prefill", "decode"}
    for each in ours:
        make_parser().parse_args([word.replace("$(POD_IP)", "10.0.0.1") for word in each["args"]])
        named = {env["name"] for env in each["env"]}
        assert {name.removeprefix("TANDEM_").lower() for name in named if name.startswith("TANDEM_")} <= KNOWN_NAMES
        assert {"TANDEM_REDIS_URL", "TANDEM_CLUSTER_SECRET_FILE"} <= named
        mounted = {mount["name"] for mount in each["volumeMounts"]}
        assert "cluster-key" in mounted
    for each in objects(values):
        if each["kind"] == "Deployment" and each["metadata"]["name"] not in ("demo-redis", "demo-scaler"):
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
    for name, each in scaled.items():
        assert "replicas" not in by_kind(FULL, "Deployment")[name]["spec"], "two would decide"
        for trigger in each["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            assert set() < asked_for(query) <= series(), query
            assert trigger["name"] == "requests" or f'role="{name.removeprefix("demo-")}"' in query
            assert float(trigger["metadata"]["threshold"]) > 0
    assert by_kind(KEY, "ScaledObject") == by_kind(SCALER, "ScaledObject") == by_kind(FULL, "Role") == {}


def test_a_scaler_of_ours_may_size_its_pools_and_nothing_else() -> None:
    scaler = by_kind(SCALER, "Deployment")["demo-scaler"]["spec"]["template"]["spec"]
    words = scaler["containers"][0]["args"]
    given = filled(SCALE_OPTIONS, make_parser().parse_args(words))
    names, bounds = pools_of(given.pool)
    assert names == {"prefill": "demo-prefill", "decode": "demo-decode"}
    assert bounds == {role: Bounds(1, 8) for role in names}
    assert (given.idle_s, given.dry_run) == (300.0, True)
    (rule,) = by_kind(SCALER, "Role")["demo-scaler"]["rules"]
    assert sorted(rule.pop("resourceNames")) == sorted(names.values())
    (said,) = yaml.safe_load(blocks("yaml", "docs/scaling.md")[0].text)["rules"]
    assert {**said, "resourceNames": []} == {**rule, "resourceNames": []}, "the page says the same"
    binding, account = (by_kind(SCALER, kind)["demo-scaler"] for kind in ("RoleBinding", "ServiceAccount"))
    assert binding["roleRef"]["name"] == binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert scaler["serviceAccountName"] == account["metadata"]["name"]
    assert "automountServiceAccountToken" not in scaler
    routers = by_kind(SCALER, "Service")[urlsplit(given.url).hostname]["spec"]
    assert routers["clusterIP"] == "None", "so that its name has the address of each router"
    router = by_kind(SCALER, "Deployment")["demo-router"]["spec"]["template"]
    assert routers["selector"].items() <= router["metadata"]["labels"].items()
    assert container(by_kind(SCALER, "Deployment")["demo-router"])["ports"][0]["containerPort"] == 8000
    assert urlsplit(given.url).port == 8000
    labels = by_kind(SCALER, "Deployment")["demo-scaler"]["spec"]["template"]["metadata"]["labels"]
    (rule,) = by_kind(SCALER, "NetworkPolicy")["demo-router"]["spec"]["ingress"]
    assert any(
        peer.get("podSelector", {}).get("matchLabels", {"": ""}).items() <= labels.items() for peer in rule["from"]
    )
