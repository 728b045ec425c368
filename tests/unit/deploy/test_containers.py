"""The Dockerfile and compose files: what they copy, mount and start is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from wings import WINGS

from tandem.deploy.cli import make_parser
from tandem.deploy.options import KNOWN_NAMES

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "containers"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text())


def test_the_cluster_is_whole() -> None:
    services = compose()["services"]
    ours = {name: service for name, service in services.items() if "entrypoint" not in service and "build" in service}
    assert sorted(service["command"][0] for service in ours.values()) == ["decode"] * 2 + ["prefill"] * 2 + ["router"]
    for name, service in ours.items():
        command = [word.replace("${MODEL:-/opt/tandem/demo_model}", "demo") for word in service["command"]]
        parsed = make_parser().parse_args(command)
        assert getattr(parsed, "advertise_host", name) == getattr(parsed, "node_id", name) == name
        assert {key.removeprefix("TANDEM_").lower() for key in service["environment"]} <= KNOWN_NAMES
        assert service["environment"]["TANDEM_REDIS_URL"] == "redis://redis:6379"
        assert set(service["depends_on"]) == {"redis"}
        assert service["secrets"] == ["cluster_key"]
        assert service["environment"]["TANDEM_CLUSTER_SECRET_FILE"] == "/run/secrets/cluster_key"
    assert set(compose("compose.gpu.yaml")["services"]) == {name for name in ours if name != "router"}


def test_what_is_mounted_and_built_is_there() -> None:
    made_by_hand = {FOLDER / "cluster.key"}
    for service in compose()["services"].values():
        for volume in service.get("volumes", ()):
            source, target, _ = volume.split(":")
            assert (FOLDER / source).is_file(), volume
            assert target[0] == "/"
        if "build" in service:
            context = FOLDER / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).samefile(FOLDER / "Dockerfile")
            arguments = set(re.findall(r"^ARG (\w+)", DOCKERFILE, flags=re.MULTILINE))
            assert set(service["build"]["args"]) <= arguments
    assert {FOLDER / secret["file"] for secret in compose()["secrets"].values()} == made_by_hand
    scraped = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["router:8000"]}]
    mounted = [
        volume for volume in compose()["services"]["prometheus"]["volumes"] if scraped["rule_files"][0] in volume
    ]
    assert len(mounted) == 1


def test_the_image_gets_every_wing_and_nothing_else() -> None:
    let_in = {line[1:] for line in (FOLDER / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"}
    assert let_in == {"LICENSE", "README.md", "pyproject.toml", "tandem", *WINGS}
    extras = set(re.findall(r"extras=([\w,]+)", DOCKERFILE))
    known = re.search(r"\[project\.optional-dependencies\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.DOTALL)
    assert known
    there = set(re.findall(r"^(\w+) = \[", known[1], flags=re.MULTILINE))
    assert {name for extra in extras for name in extra.split(",")} <= there
    assert 'ENTRYPOINT ["tandem"]' in DOCKERFILE
    assert "/opt/tandem/demo_model" in DOCKERFILE
