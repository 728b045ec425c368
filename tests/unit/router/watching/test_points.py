"""What the dashboard draws, reckoned from what processes and nodes wrote down."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo, Targets
from tandem.engine.contracts.wire.work import Leaning
from tandem.router.metrics.catalog import NODE_METRICS
from tandem.router.metrics.model_metrics import LATENCY_BUCKETS_S
from tandem.router.placing.view import NodeView
from tandem.router.recent.ring import MOST_PAIRS, RecentRequests
from tandem.router.recent.story import RequestStory
from tandem.router.watching.fleet import FOLLOWED, TIERS, FleetLog, FleetSample
from tandem.router.watching.points import SERIES, PointMaker, quantile
from tandem.router.watching.samples import KEPT_TICKS, RouterSample, RouterTotals, SampleLog, merged

DASHBOARD = Path(__file__).resolve().parents[4] / "router" / "http" / "dashboard"


def node(name: str, role: str, **said: object) -> NodeView:
    info = NodeInfo(node_id=name, epoch=1, role=role, pid=1)  # type: ignore[arg-type]
    return NodeView(info, Status(node_id=name, epoch=1, **said))  # type: ignore[arg-type]


def story(name: str, at: float, ttft_s: float = 0.0) -> RequestStory:
    return RequestStory(name, (name,), at, at, 10, 10, 1, Targets(ttft_s=ttft_s))


def test_what_is_followed_is_what_nodes_report() -> None:
    known = {metric.key for metric in NODE_METRICS}
    assert set(FOLLOWED) <= known
    assert {f"tier_{tier}_{what}" for tier in TIERS for what in ("blocks", "capacity")} <= known


def test_charts_name_series_that_there_are() -> None:
    source = (DASHBOARD / "charts.js").read_text()
    drawn = {name for name in SERIES if f'"{name}"' in source}
    for name in re.findall(r'P50_P95\("(\w+)"', source):
        drawn |= {f"{name}50", f"{name}95"}
    assert drawn == set(SERIES)
    named = re.findall(r'\["(\w+)", "[\w ]+", (?:"|units)', source)
    assert len(named) > 20
    assert set(named) <= set(SERIES)


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([0, 0, 0], 0.5, None),
        ([4, 0, 0], 0.5, 0.5),  # half way through the first bucket, which begins at 0
        ([1, 1, 0], 1.0, 2.0),
        ([0, 10, 0], 0.5, 1.5),
        ([0, 0, 7], 0.5, 2.0),  # no upper bound: the lower one
        ([9, 1, 0], 0.95, 1.5),
    ],
)
def test_a_quantile_is_within_its_bucket(counts: list[int], share: float, expected: float | None) -> None:
    assert quantile((1.0, 2.0), counts, share) == expected


def test_a_log_says_what_was_added_since() -> None:
    log, recent = SampleLog(), RecentRequests()
    log.take(1, RouterTotals({"finished": 5.0}, {"ttft": (3, 2)}), recent, 0, now=0.0)
    recent.begin(story("waits", at=0.0, ttft_s=2.0))
    got = story("got", at=0.0, ttft_s=2.0)
    recent.begin(got)
    got.first_token(0.5)
    recent.flowed("p", "d", 100)
    recent.flowed("p", "d", 50)
    log.take(2, RouterTotals({"finished": 9.0}, {"ttft": (3, 4)}), recent, 1, now=1.0)
    log.take(3, RouterTotals({"finished": 1.0}, {"ttft": (0, 1)}), recent, 0, now=4.0)  # it counts anew
    second, third = log.since(1)
    assert (second.added, second.buckets, second.flows) == ({"finished": 4.0}, {"ttft": [(1, 2)]}, [("p", "d", 2, 150)])
    assert (second.least_slack_s, second.late, second.waiting) == (1.0, 0, 1)
    assert (third.added, third.buckets, third.flows) == ({}, {"ttft": []}, [])
    assert (third.least_slack_s, third.late) == (-2.0, 1)
    assert log.since(3) == []
    for number in range(4, KEPT_TICKS + 10):
        log.take(number, RouterTotals(), recent, 0, now=9.0)
    assert len(log.since(0)) == KEPT_TICKS


def test_flows_of_a_tick_are_bounded() -> None:
    recent = RecentRequests()
    for number in range(MOST_PAIRS + 5):
        recent.flowed(f"p{number}", "d", 1)
    assert len(recent.take_flows()) == MOST_PAIRS
    assert recent.take_flows() == {}


def test_processes_add_up() -> None:
    one = RouterSample(7, {"finished": 1.0}, {"ttft": [(0, 1)]}, [("p", "d", 1, 10)], 2, 0, 0.5)
    two = RouterSample(7, {"finished": 2.0, "kept": 1.0}, {"ttft": [(0, 2), (3, 1)]}, [("p", "d", 2, 20)], 0, 1, -0.5)
    both = merged(7, [one, two])
    assert both.added == {"finished": 3.0, "kept": 1.0}
    assert (both.waiting, both.late, both.least_slack_s) == (2, 1, -0.5)
    point = PointMaker().point(both, FleetSample(7))
    assert (point["finished"], point["kept"], point["ttft50"]) == (3.0, 1.0, round(LATENCY_BUCKETS_S[0] * 2 / 3, 6))


def test_a_point_looks_back_and_has_nothing_to_say_without_events() -> None:
    maker = PointMaker()
    first = maker.point(RouterSample(0, {"ended": 4.0, "finished": 1.0}), FleetSample(0, {"kv_pushed_bytes": 50.0}))
    assert first.keys() == set(SERIES)
    assert (first["failed"], first["pushed"], first["push_rate"], first["ttft95"]) == (3.0, 50.0, None, None)
    assert (first["hit_pool"], first["kv_disk"], first["slack"]) == (None, None, None)
    looked_up = {"prompt_tokens": 100.0, "cached_tokens": 60.0, "tier_host_hit_tokens": 20.0, "pull_tokens": 10.0}
    second = maker.point(RouterSample(1), FleetSample(1, looked_up, {"pool": 0.5}))
    assert (second["failed"], second["pushed"]) == (1.5, 25.0)
    assert [second[f"hit_{where}"] for where in ("pool", "host", "disk", "peer")] == [0.3, 0.2, 0.0, 0.1]
    assert second["kv_pool"] == 0.5
    for number in range(2, 30):
        last = maker.point(RouterSample(number), FleetSample(number))
    assert (last["failed"], last["hit_pool"], last["kv_pool"]) == (0.0, None, None)


def test_nodes_are_followed_one_by_one() -> None:
    log = FleetLog()
    prefill = node("p", "prefill", num_blocks=10, num_free_blocks=4, block_size=16, num_running=2)
    both = node(
        "u",
        "unified",
        num_blocks=30,
        num_free_blocks=30,
        block_size=16,
        prefill_s_per_token=0.001,
        leaning=Leaning("decode", why="streams need it"),
    )
    log.take(1, [prefill, both])
    counters = {"busy_s": 0.5, "step_tokens": 110.0, "step_rows": 10.0, "kv_pushed_bytes": 3e6, "tier_host_blocks": 1.0}
    for view in (prefill, both):
        said = view.status
        fields = {name: getattr(said, name) for name in said.__struct_fields__}
        view.note_status(Status(**{**fields, "counters": {**counters, "tier_host_capacity": 4.0}}), 1.0)
    log.take(2, [prefill, both])
    newest = log.samples[-1]
    assert newest.shares == {"pool": 0.15, "host": 0.25}
    assert (newest.added["busy_prompts_s"], newest.added["busy_tokens_s"]) == pytest.approx((0.6, 0.4))
    shown = log.shown([both, prefill])
    assert [each["id"] for each in shown] == ["p", "u"]
    assert [each["prompt_share"] for each in shown] == [1.0, 0.2]
    assert [each["leaning"] for each in shown] == ["prefill", "decode"]
    assert shown[1]["why"] == "streams need it"
    assert shown[0]["shares"] == {"pool": 0.6, "host": 0.25}
    assert shown[0]["pushed_per_s"] == 1_500_000
    reborn = node("p", "prefill", counters={"busy_s": 99.0})  # what it had before it was met is nobody's growth
    reborn.key = both.key._replace(node_id="p", epoch=2)
    log.take(3, [reborn])
    assert log.samples[-1].added.get("busy_s", 0.0) == 0.0
