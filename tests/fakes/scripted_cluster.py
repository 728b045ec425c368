"""A router in front of the scripted model, on one node and split, and openai's client of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from router_in_thread import RouterInThread
from scripted_model import make_scripted_model
from waiting import PATIENCE_S

from in_process_cluster import Node, node_options


def serve(folder: Path, nodes: list[Node], **options: Any) -> RouterInThread:
    addresses = tuple(node.info.control_address for node in nodes)
    return RouterInThread(folder, addresses, local_tail_tokens=0, **options)


def openai_client(router: RouterInThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    return make_scripted_model(tmp_path_factory.mktemp("models") / "scripted")


@pytest.fixture(scope="module", params=["unified", "split"])
def nodes(request: pytest.FixtureRequest, model: tuple[Path, Any]) -> Iterator[list[Node]]:
    roles = ["unified"] if request.param == "unified" else ["prefill", "decode"]
    started = [Node(node_options(role, model[0])) for role in roles]
    yield started
    for node in started:
        node.stop()


@pytest.fixture(scope="module")
def router(nodes: list[Node], model: tuple[Path, Any]) -> Iterator[RouterInThread]:
    with serve(model[0], nodes) as router:
        yield router.wait_ready()


@pytest.fixture(scope="module")
def client(router: RouterInThread) -> Iterator[openai.OpenAI]:
    with openai_client(router) as client:
        yield client
