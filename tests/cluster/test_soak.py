"""Clusters that are hurt at random moments under load, by every kind of moment of tests/soak: each answer equals an
undisturbed node's, every request ends, nothing is leaked. And one that only serves, and doesn't grow.

SOAK_MOMENTS (120) says how many moments, shared out among the settings, SOAK_SEED (1) which ones, SOAK_SECONDS (300)
how long the moments of one setting may take; `.venv/bin/python tests/soak kill` runs one campaign as long as you like.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from campaign import Plan, run_campaign
from memory import MemoryPlan, run_memory_soak
from settings import SETTINGS, missing, possible_kinds

NUM_MOMENTS = int(os.environ.get("SOAK_MOMENTS", "120"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
SECONDS = float(os.environ.get("SOAK_SECONDS", "300"))
MINUTES = float(os.environ.get("SOAK_MINUTES", "5"))

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_moments_change_no_answer_and_leak_nothing(setting: str, tmp_path: Path) -> None:
    if missing(setting):
        pytest.skip(missing(setting))
    moments = NUM_MOMENTS // len(SETTINGS)
    plan = Plan(tmp_path, moments, SEED, kinds=possible_kinds(), seconds_limit=SECONDS, **SETTINGS[setting])
    summary = run_campaign(plan)
    print(summary)
    assert summary.failures == []
    assert sum(summary.struck.values()) > summary.moments / 2
    assert summary.ends["equal"] > 40, "more than it answered before and after"


def test_a_cluster_that_serves_does_not_grow(tmp_path: Path) -> None:
    plan = MemoryPlan(tmp_path, MINUTES, SEED, "tcp", arguments=("--host-tier-bytes", str(4 << 20)))
    summary = run_memory_soak(plan)
    print(summary)
    assert summary["hung"] == 0
    assert summary["wrong"] == []
    for series in summary["verdicts"]:
        allowed = 64 << 20 if series["what"] in ("rss", "pss") else 16
        assert series["last"] - series["middle"] < allowed, series
