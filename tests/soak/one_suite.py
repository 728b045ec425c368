"""pytest with a journal: `python one_suite.py JOURNAL ARGUMENTS...`, a line of JSON as each thing happens.

What was known stands in the journal also when the run is killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest


class Journal:
    """A plugin of the process that hands tests out: reports of all workers come by here, a worker's death too."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._tell(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(report)

    def pytest_internalerror(self, excrepr: object) -> None:
        self.write(name="pytest itself", outcome="failed", text=str(excrepr))

    def _tell(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        text = "\n".join([report.longreprtext, *(f"--- {title}\n{said}" for title, said in report.sections)])
        self.write(name=report.nodeid, outcome=report.outcome, text=text if report.failed else "")

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()


def main(path: str, *arguments: str) -> int:
    journal = Journal(Path(path))
    code = int(pytest.main(list(arguments), plugins=[journal]))
    journal.write(code=code, cpu_s=sum(os.times()[:4]))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
