"""Runs all interpreted_*.py in a process of their own: interpreter mode is read when triton is first imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

FOLDER = Path(__file__).parent


def test_kernels_agree_with_their_references_under_the_interpreter() -> None:
    why = "triton is not installed, or too old: before 3.7.1 its interpreter can't stand newer numpy (extra `test`)"
    pytest.importorskip("triton", minversion="3.7.1", reason=why)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    cases = map(str, sorted(FOLDER.glob("interpreted_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *cases]
    finished = subprocess.run(
        command, env=environment, cwd=FOLDER, capture_output=True, text=True, timeout=6 * PATIENCE_S, check=False
    )
    assert finished.returncode == 0, finished.stdout[-8000:] + finished.stderr[-2000:]
    assert re.search(r"\b[1-9]\d* passed", finished.stdout), finished.stdout[-2000:]
    assert "skipped" not in finished.stdout
