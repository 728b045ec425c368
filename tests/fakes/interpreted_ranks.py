"""Ranks that exchange rows through a file that all map, kernels under Triton's interpreter: a process each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from waiting import PATIENCE_S


def run_interpreted(script: str, num_ranks: int, memory: Path, num_bytes: int) -> None:
    """Runs `script` with RANK, RANKS and `memory`, a file of so many zeros, in all ranks; asserts that all end well."""
    memory.write_bytes(bytes(num_bytes))
    command = [sys.executable, script]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen([*command, str(rank), str(num_ranks), str(memory)], stderr=subprocess.PIPE, env=environment)
        for rank in range(num_ranks)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=4 * PATIENCE_S)
            assert rank.returncode == 0, errors.decode()
    finally:
        for rank in ranks:
            rank.kill()
