"""A model that is named as on the hub: found in a cache laid out by hand, with the network off, by all processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from real_cluster import RealCluster
from tandem.deploy.options import DEMO_MODEL
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_folder import resolve_model, served_name

MAIN, OLD = "a" * 40, "b" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`acme/tiny` twice: the demo model as `old`, and a newer revision, on `main`, that nothing could serve."""
    model = tmp_path / "models--acme--tiny"
    for commit, ref in ((MAIN, "main"), (OLD, "old")):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "refs").mkdir(exist_ok=True)
        (model / "refs" / ref).write_text(commit)
    (model / "snapshots" / MAIN / "config.json").write_text('{"architectures": ["Nothing"]}')
    for file in DEMO_MODEL.iterdir():
        (model / "snapshots" / OLD / file.name).symlink_to(file)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return model


# README says: "a Hugging Face folder, or a hub name"
def test_serve_takes_a_hub_name_and_a_revision(cache: Path) -> None:
    with RealCluster(Path("acme/tiny"), "--revision", "old") as served:
        assert [model["id"] for model in served.client.get("/v1/models").json()["data"]] == ["tiny"]
        assert served.client.post("/v1/completions", json={"model": "tiny", "prompt": "def"}).status_code == 200
        wait_until(lambda: "serving tiny on" in served.log(), "the launcher's word")
        for child in psutil.Process(served.process.pid).children():
            assert str(cache / "snapshots" / OLD) in child.cmdline(), "all serve one snapshot"


def test_a_node_and_a_router_take_one_for_themselves(cache: Path) -> None:
    code = """
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, RouterOptions
from tandem.node.setup import load
from tandem.router.process.worker import Worker
model = ModelOptions("acme/tiny", revision="old")
Worker(RouterOptions(model))
print(load(NodeOptions("unified", model, CacheOptions(num_blocks=16), device="cpu")).served_name)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "tiny\n"), result.stderr


def test_what_is_not_in_the_cache_is_refused(cache: Path) -> None:
    code = "from tandem.deploy.cli import main; raise SystemExit(main(['serve', 'acme/other', '--port', '0']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert "not in the local hub cache" in result.stderr


def test_served_names(tmp_path: Path) -> None:
    assert served_name("acme/tiny") == "tiny"
    assert served_name("acme/tiny", "mine") == "mine"
    (tmp_path / "link").symlink_to(tmp_path)
    assert served_name(str(tmp_path / "link")) == tmp_path.name
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model("/no/such/folder")
