"""Ranks that exchange rows through a file that all map, kernels under Triton's interpreter: a process each."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

from tandem.deploy.launch.child_process import die_with_parent


def run_interpreted(script: str, num_ranks: int, memory: Path, num_bytes: int) -> None:
    """Runs `script` with RANKS and `memory`, a file of so many zeros; asserts that all ranks it forks end well."""
    memory.write_bytes(bytes(num_bytes))
    command = [sys.executable, script, str(num_ranks), str(memory)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=4 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def fork_ranks(num_ranks: int, run: Callable[[int], None]) -> None:
    """Does `run(rank)` in processes of their own, forked from this one, which has imported what takes seconds. Ends
    with the last of them, or with the first that fails, and they with it."""
    _leave_cores_while_waiting()
    for rank in range(num_ranks):
        if not os.fork():
            _be_rank(rank, run)
    for _ in range(num_ranks):
        if os.wait()[1]:
            os._exit(1)
    os._exit(0)


def _be_rank(rank: int, run: Callable[[int], None]) -> None:
    die_with_parent()
    code = 1
    try:
        run(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def _leave_cores_while_waiting() -> None:
    """Whoever reads a word that others write, again and again, lets them run between, where there are fewer cores than
    ranks."""
    import interpreted_once  # noqa: F401  # for what it does
    from triton.runtime.interpreter import InterpreterBuilder

    def leaving(load: Callable[..., Any]) -> Callable[..., Any]:
        def load_and_leave(*arguments: Any) -> Any:
            if arguments[-1]:  # volatile
                os.sched_yield()
            return load(*arguments)

        return load_and_leave

    InterpreterBuilder.create_load = leaving(InterpreterBuilder.create_load)
    InterpreterBuilder.create_masked_load = leaving(InterpreterBuilder.create_masked_load)
