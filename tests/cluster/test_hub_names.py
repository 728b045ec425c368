"""A model that is named as on the hub: found in a cache laid out by hand, with the network off, by all processes."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from real_cluster import RealCluster
from tandem.deploy.cli import main
from tandem.deploy.options import DEMO_MODEL
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, RouterOptions
from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_folder import resolve_model, served_name
from tandem.node.setup import load
from tandem.router.process.worker import Worker

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
    for name, value in (("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", True)):  # read when it was imported here
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    return model


# README says: "a Hugging Face folder, or a hub name"
def test_serve_takes_a_hub_name_and_a_revision(cache: Path) -> None:
    with RealCluster(Path("acme/tiny"), "--revision", "old") as served:
        assert [model["id"] for model in served.client.get("/v1/models").json()["data"]] == ["tiny"]
        assert served.client.post("/v1/completions", json={"model": "tiny", "prompt": "def"}).status_code == 200
        wait_until(lambda: "serving tiny on" in served.log(), "the launcher's word")
        assert len(re.findall("INFO.*where a request doesn't say how to sample: OpenAI's", served.log())) == 1
        for child in psutil.Process(served.process.pid).children():
            assert str(cache / "snapshots" / OLD) in child.cmdline(), "all serve one snapshot"


def test_a_node_and_a_router_take_one_for_themselves(cache: Path) -> None:
    model = ModelOptions("acme/tiny", revision="old")
    Worker(RouterOptions(model))
    assert load(NodeOptions("unified", model, CacheOptions(num_blocks=16), device="cpu")).served_name == "tiny"


def test_what_is_not_in_the_cache_is_refused(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "acme/other", "--port", "0"]) == 2
    assert "not in the local hub cache" in capsys.readouterr().err


def test_served_names(tmp_path: Path) -> None:
    assert served_name("acme/tiny") == "tiny"
    assert served_name("acme/tiny", "mine") == "mine"
    (tmp_path / "link").symlink_to(tmp_path)
    assert served_name(str(tmp_path / "link")) == tmp_path.name
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model("/no/such/folder")
