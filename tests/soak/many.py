"""Campaigns side by side, each with a seed, a folder, ports and a Redis of its own, in every setting by turns."""

from __future__ import annotations

import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from settings import SETTINGS, missing
from table import print_tables


def run_side_by_side(
    folder: Path, at_once: int, first_seed: int, seconds_limit: float, grace_s: float, arguments: tuple[str, ...]
) -> int:
    """0 if every promise held. A campaign that still runs after limit and grace is interrupted, which breaks one."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = islice(cycle(each for each in SETTINGS if not missing(each)), at_once)
    started = time.monotonic()
    campaigns = [
        _start(folder, setting, first_seed + index, ("--seconds-limit", str(seconds_limit), *arguments))
        for index, setting in enumerate(settings)
    ]
    for campaign in campaigns:
        try:
            campaign.wait(max(1.0, started + seconds_limit + grace_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            campaign.terminate()
    codes = [campaign.wait() for campaign in campaigns]
    summaries = folder / "summaries.jsonl"
    summaries.write_text("".join(path.read_text() for path in sorted(folder.rglob("summary.json"))))
    print_tables([summaries])
    return max(codes)


def _start(folder: Path, setting: str, seed: int, arguments: tuple[str, ...]) -> subprocess.Popen[bytes]:
    program = [sys.executable, str(Path(__file__).parent), "kill"]
    own = folder / f"seed-{seed}"
    own.mkdir(exist_ok=True)
    with (own / "campaign.log").open("wb") as log:
        command = [*program, "--setting", setting, "--seed", str(seed), "--moments", "100000", "--folder", str(own)]
        return subprocess.Popen([*command, *arguments], stdout=log, stderr=log)
