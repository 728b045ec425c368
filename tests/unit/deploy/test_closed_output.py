"""`tandem … | head`: who reads a command's output may leave before its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_left_is_no_fault(unbuffered: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        command = [sys.executable, "-m", "tandem.deploy.cli", "version"]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, text=True, env=environment)
    assert (done.returncode, done.stderr) == (141, "")
