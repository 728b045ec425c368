"""How a request is sampled that doesn't say: as generation_config.json does, on one node and split, over HTTP."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from router_in_thread import RouterInThread
from waiting import PATIENCE_S

from in_process_cluster import Node, node_options
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.generation_config import SamplingDefaults, sampling_defaults
from tiny_models import tiny_model

SHARP = {"temperature": 0.01, "top_p": 0.1, "max_new_tokens": 24}
PROMPT = "Return a new"
MODEL = tiny_model("llama")


def model_with(folder: Path, **generation: object) -> Path:
    shutil.copytree(MODEL, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **generation}))
    return folder


@pytest.fixture(scope="module", params=["unified", "split"])
def addresses(request: pytest.FixtureRequest) -> Iterator[tuple[str, ...]]:
    roles = ["unified"] if request.param == "unified" else ["prefill", "decode"]
    nodes = [Node(node_options(role, MODEL)) for role in roles]
    yield tuple(node.info.control_address for node in nodes)
    for node in nodes:
        node.stop()


def three_texts(folder: Path, addresses: tuple[str, ...], choice: str = "auto", **fields: object) -> list[str]:
    """Of requests that have no seed."""
    options = {"generation_config": choice, "local_tail_tokens": 0}
    with RouterInThread(folder, addresses, **options) as router:
        router.wait_ready()
        body = {"prompt": PROMPT, **fields}
        answers = [router.client.post("/v1/completions", json=body, timeout=PATIENCE_S) for _ in range(3)]
    assert all(answer.status_code == 200 for answer in answers), answers[0].text
    return [answer.json()["choices"][0]["text"] for answer in answers]


def test_what_a_request_leaves_open_is_as_the_model_says(addresses: tuple[str, ...], tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", **SHARP)
    texts = three_texts(folder, addresses)
    assert len(set(texts)) == 1
    assert len(texts[0]) > 24  # by max_new_tokens; OpenAI's default would be 16 tokens
    assert len(set(three_texts(folder, addresses, temperature=1.0, top_p=1.0))) > 1
    assert len(set(three_texts(folder, addresses, choice="none", max_tokens=24))) > 1
    assert len(set(three_texts(MODEL, addresses, choice=str(folder)))) == 1


def test_openais_defaults_hold_where_the_model_says_nothing(addresses: tuple[str, ...]) -> None:
    with RouterInThread(MODEL, addresses) as router:
        answer = router.wait_ready().client.post("/v1/completions", json={"prompt": PROMPT, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_a_default_length_gives_way_to_the_models_own(addresses: tuple[str, ...], tmp_path: Path) -> None:
    folder = model_with(tmp_path / "model", max_new_tokens=100_000)
    with RouterInThread(folder, addresses) as router:
        body = {"prompt": [5] * 2000, "ignore_eos": True}
        answer = router.wait_ready().client.post("/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.json()["usage"]["completion_tokens"] == 48


def test_files_that_can_not_hold_are_refused_by_name(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, "auto") == SamplingDefaults()  # no file
    with pytest.raises(ConfigError, match=r"there is no .*generation_config\.json; name its folder"):
        sampling_defaults(tmp_path, str(tmp_path))
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": 2.5}, {"temperature": "hot"}, {"repetition_penalty": 0}):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(
            CheckpointError, match=rf"generation_config\.json.*{next(iter(wrong))}.*generation-config none"
        ):
            sampling_defaults(tmp_path, "auto")
        assert sampling_defaults(tmp_path, "none") == SamplingDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True}))
    assert str(sampling_defaults(tmp_path, "auto")) == "temperature 0.6, top_k 20"
