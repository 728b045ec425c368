"""The forms of a log, and the names of processes, as a process of its own shows them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

CODE = """
import logging, sys
from tandem.engine.process.process_log import RateLimited, start_log
from tandem.engine.process.process_name import name_process
start_log()
start_log("info", sys.argv[1])
name_process(sys.argv[2])
log = logging.getLogger("tandem.node.report")
log.debug("unheard")
log.info("serves %s", "m")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("broke")
    RateLimited(log).exception("request %s broke", "cmpl-7", request_id="cmpl-7")
print(open("/proc/self/comm").read().strip() if sys.platform == "linux" else "")
"""


def shown(log_format: str, name: str = "router") -> tuple[list[str], str]:
    command = [sys.executable, "-c", CODE, log_format, name]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stderr.splitlines(), result.stdout.strip()


def test_a_log_is_plain_where_no_terminal_is() -> None:
    lines, _ = shown("auto")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO tandem\.node\.report: serves m", lines[0])
    assert lines[2] == "Traceback (most recent call last):"


def test_a_log_is_short_and_coloured_for_people() -> None:
    lines, _ = shown("color")
    assert re.fullmatch(r"\d\d:\d\d:\d\d INFO    node\.report: serves m", re.sub(r"\x1b\[\d+m", "", lines[0]))
    assert "\x1b[31mERROR" in lines[1]


def test_a_log_is_an_object_a_line_for_machines() -> None:
    info, error, about = map(json.loads, shown("json")[0])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", info.pop("time"))
    assert info == {"level": "info", "logger": "tandem.node.report", "message": "serves m"}
    assert error["level"] == "error"
    assert error["exception"].endswith("ZeroDivisionError: division by zero")
    assert (about["id"], about["message"]) == ("cmpl-7", "request cmpl-7 broke")
    assert "id" not in error


@pytest.mark.skipif(sys.platform != "linux", reason="names are Linux's")
@pytest.mark.parametrize(
    ("name", "seen"),
    [("decode-0-3fa2b1", "tandem decode-0"), ("prefill-0-3fa2b1 1", "prefill-0 1"), ("router", "tandem router")],
)
def test_processes_go_by_their_names(name: str, seen: str) -> None:
    assert shown("plain", name)[1] == seen
