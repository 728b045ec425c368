"""Requests made of /openapi.json: no 5xx, nothing accepted that it forbids, no answer that it does not name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread

from stand_in_node import StandInNode

FAKES = Path(__file__).resolve().parents[3] / "fakes"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ tools or '' }}assistant:"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("is_strict", [False, True])
def test_the_description_is_no_lie(folder: Path, tmp_path: Path, is_strict: bool) -> None:
    """Not checked: that all which the schema allows is accepted. Ids beyond the vocabulary, say, it can't know."""
    pytest.importorskip("schemathesis", reason="pip install -e '.[contract]'")
    node = StandInNode(vocab_size=VOCAB_SIZE).start()
    options = {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "strict_requests": is_strict}
    with RouterInThread(folder, (node.address,), enable_tokenizer_info_endpoint=True, **options) as router:
        router.wait_ready()
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{router.url}/openapi.json", "--checks", "all"),
            *("--exclude-checks", "positive_data_acceptance", "--phases", "examples,coverage,fuzzing"),
            *("--max-examples", "300", "--suppress-health-check", "all"),
        ]
        environ = {**os.environ, "PYTHONPATH": str(FAKES), "SCHEMATHESIS_HOOKS": "openapi_cases"}
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
        router.wait_idle()
    node.stop()
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
