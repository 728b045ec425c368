"""The batch script for SLURM, with a stand-in of `srun` that starts the tasks on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
from parts import QUICK, ROOT, SMALL
from waiting import PATIENCE_S, happens, wait_until

from tandem.deploy.redis_server import free_port
from tiny_models import random_prompt, tiny_model

SRUN = """#!/usr/bin/env bash
shift
trap 'kill -TERM $(jobs -p)' TERM
for ((task = 0; task < SLURM_NTASKS; task++)); do SLURM_PROCID=$task "$@" & done
while [ -n "$(jobs -rp)" ]; do wait; done
"""


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_the_job_serves_restarts_a_node_and_drains(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN)
    srun.chmod(0o755)
    port = free_port()
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "MODEL": str(tiny_model("llama")),
        "OPTIONS": " ".join((*SMALL, *QUICK)),
        "PREFILL": "1",
        "PORT": str(port),
        "REDIS_PORT": str(free_port()),
        "HOST_ADDRESS": "127.0.0.1",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    url, log = f"http://127.0.0.1:{port}", tmp_path / "log"
    with log.open("w") as out:
        script = ["bash", str(ROOT / "deploy/slurm/tandem.sbatch")]
        job = subprocess.Popen(script, env=environment, stdout=out, stderr=out, start_new_session=True)
        try:
            assert happens(lambda: answers(url), 2 * PATIENCE_S), log.read_text()
            body = {"prompt": random_prompt(150, seed=5), "max_tokens": 8}
            assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
            assert (tmp_path / "tandem-7.secret").stat().st_mode & 0o077 == 0
            children = psutil.Process(job.pid).children(recursive=True)
            next(child for child in children if "decode" in child.cmdline()).kill()
            wait_until(lambda: not answers(url), "the loss")
            wait_until(lambda: answers(url), "another decode node", 2 * PATIENCE_S)
            job.send_signal(signal.SIGTERM)
            assert job.wait(2 * PATIENCE_S) == 0, log.read_text()
            assert not (tmp_path / "tandem-7.secret").exists()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
