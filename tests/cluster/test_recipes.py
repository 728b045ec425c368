"""The programs of docs/quickstart.md and docs/recipes.md, as they stand there, on a split cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documented import blocks
from router_in_thread import RouterInThread
from scripted_model import SCRIPTS, make_scripted_model

from in_process_cluster import Node, node_options

pytestmark = pytest.mark.slow
# Calls tools until it has their results. The mark in front tells how the model writes calls; it has no reasoning.
TEMPLATE = (
    "{# <tool_call> #}{% for message in messages %}{{ message.content }} #{% endfor %}"
    "{% if tools and messages[-1].role != 'tool' %}<|say:call|>{% else %}<|say:hello|>{% endif %}"
)


def serve(folder: Path, **options: Any) -> Iterator[RouterInThread]:
    nodes = [Node(node_options(role, folder)) for role in ("prefill", "decode")]
    addresses = tuple(node.info.control_address for node in nodes)
    with RouterInThread(folder, addresses, **options) as router:
        yield router.wait_ready()
    for node in nodes:
        node.stop()


@pytest.mark.parametrize("page", ["quickstart.md", "recipes.md"])
def test_programs_run(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = make_scripted_model(tmp_path / "scripted")
    for router in serve(folder, chat_template=TEMPLATE):
        names: dict[str, Any] = {}
        said = []
        for block in blocks("python", f"docs/{page}"):
            exec(block.text.replace("http://localhost:8000", router.url), names)
            said.append(capsys.readouterr().out.strip())
        assert said[-1]
        if page == "quickstart.md":
            assert said == [SCRIPTS["hello"]]
        else:
            assert said[:4] == ["", *[SCRIPTS["hello"]] * 3]
            assert said[4] in ("good", "bad")
            assert names["messages"][1]["tool_calls"][0]["function"]["name"] == "get_weather"
