"""Pools grow with what is lacking, shrink late and one by one, and go to zero and back together with the requests."""

from __future__ import annotations

from collections import defaultdict

import pytest

from tandem.deploy.launch.scaled_pools import ScaledPools
from tandem.deploy.scale.pools import Bounds, PoolScaler, Seen
from tandem.deploy.scale.reading import seen_in
from tandem.engine.contracts.wire.connection import Status
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.router.metrics.nodes import NodeReading
from tandem.router.metrics.router_metrics import FIGURES, RouterMetrics
from tandem.router.placing.view import NodeView

IDLE_S = 60.0
BOUNDS = {"prefill": Bounds(0, 4), "decode": Bounds(1, 3)}


def node(role: str, **figures: float) -> NodeReading:
    return NodeReading(role, defaultdict(float, figures))


def busy(prefill_tokens: float = 0.0, kv: float = 0.0, waiting: float = 0.0, **router: float) -> Seen:
    """A cluster of one node of each role."""
    nodes = {"p": node("prefill", num_waiting_tokens=prefill_tokens),
             "d": node("decode", kv_used_share=kv, num_waiting=waiting)}  # fmt: skip
    return Seen(nodes, **{"num_active": 1.0, **router})


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (busy(), {}),
        (busy(prefill_tokens=30_000), {"prefill": 2}),
        (busy(prefill_tokens=21_000), {}),  # a tenth of a node isn't worth one
        (busy(prefill_tokens=1e9), {"prefill": 4}),
        (busy(kv=0.95, waiting=7), {"decode": 2}),
        (busy(waiting=100), {"decode": 3}),
    ],
)
def test_a_pool_grows_at_once_by_what_is_lacking_within_its_bounds(seen: Seen, wanted: dict[str, int]) -> None:
    assert PoolScaler(BOUNDS, IDLE_S).look(seen, {"prefill": 1, "decode": 1}, 0.0) == wanted


def test_a_pool_shrinks_late_and_one_by_one() -> None:
    scaler, sizes, changes = PoolScaler(BOUNDS, IDLE_S), {"prefill": 4, "decode": 3}, []
    for now in range(400):
        seen = busy(kv=1.3) if now == 100 else busy()  # for a moment two decode nodes are needed
        for pool, size in scaler.look(seen, sizes, float(now)).items():
            sizes[pool] = size
            changes.append((now, pool, size))
    assert [change for change in changes if change[1] == "prefill"] == [
        (60, "prefill", 3), (120, "prefill", 2), (180, "prefill", 1)]  # fmt: skip
    assert sizes == {"prefill": 1, "decode": 1}, "what works is served"


def test_a_short_need_begins_the_wait_anew() -> None:
    scaler, sizes = PoolScaler(BOUNDS, IDLE_S), {"prefill": 1, "decode": 2}
    for now in range(0, 110, 10):
        assert scaler.look(busy(kv=1.3) if now == 50 else busy(), sizes, float(now)) == {}
    assert scaler.look(busy(), sizes, 121.0) == {"decode": 1}


def test_an_idle_cluster_goes_to_zero_and_a_request_that_waits_brings_it_back() -> None:
    scaler, nothing = PoolScaler({role: Bounds(0, 2) for role in BOUNDS}, IDLE_S), Seen({})
    sizes = {"prefill": 1, "decode": 1}
    assert scaler.look(nothing, sizes, 0.0) == {}
    assert scaler.look(nothing, sizes, IDLE_S) == {"prefill": 0, "decode": 0}
    sizes = {"prefill": 0, "decode": 0}
    assert scaler.look(nothing, sizes, 2 * IDLE_S) == {}
    assert scaler.look(Seen({}, num_without_node=3.0), sizes, 2 * IDLE_S + 1) == {"prefill": 1, "decode": 1}


def test_nodes_that_do_all_work_go_by_what_is_promised_too() -> None:
    def seen(late_work_s: float, spare: float) -> Seen:
        late = {"r": late_work_s, f"new at {late_work_s + spare}": 99.0}  # of one that was not seen before: no news
        return Seen({"n": node("unified")}, num_active=1.0, late_work_s=late, spare_nodes=spare)

    scaler = PoolScaler({"unified": Bounds(1, 9)}, IDLE_S)
    assert scaler.look(seen(5.0, 0.0), {"unified": 2}, 0.0) == {}
    assert scaler.look(seen(8.0, 0.0), {"unified": 2}, 2.0) == {"unified": 4}, "one and a half nodes were lacking"
    for now in (4.0, 4.0 + IDLE_S):
        changes = scaler.look(seen(8.0, 1.7), {"unified": 4}, now)
    assert changes == {"unified": 3}
    assert scaler.look(seen(8.0, 0.4), {"unified": 3}, 500.0) == {}, "bursts need what is spare"


def test_a_router_s_metrics_are_read() -> None:
    status = Status(node_id="d", epoch=1, num_waiting=9, counters={"kv_used_share": 0.4})
    view = NodeView(NodeInfo(node_id="d", epoch=1, role="decode", model_name="m"), status)
    metrics = RouterMetrics(lambda: [view], lambda: dict.fromkeys(FIGURES, 3.0))
    metrics.waiting.set(5)
    other = RouterMetrics(list, lambda: dict.fromkeys(FIGURES, 2.0))
    other.active.set(7)
    seen = seen_in({"a": metrics.exposition().decode(), "b": other.exposition().decode(), "away": ""})
    assert (seen.num_without_node, seen.num_active) == (5, 7)
    assert (seen.late_work_s, seen.spare_nodes) == ({"a": 3, "b": 2}, 2)
    assert (seen.nodes["d"].role, seen.nodes["d"].figures["num_waiting"]) == ("decode", 9)
    with pytest.raises(ValueError, match="not the metrics of a router"):
        seen_in({"a": "up 1\n"})
    with pytest.raises(ValueError, match="not the metrics of a router"):
        seen_in({"a": "", "b": ""})


def test_nodes_that_have_requests_are_not_idle_whichever_router_s_they_are() -> None:
    scaler = PoolScaler({"decode": Bounds(0, 2)}, 0.0)
    assert scaler.look(Seen({"d": node("decode", num_running=1.0)}), {"decode": 1}, 0.0) == {}
    assert scaler.look(Seen({"d": node("decode")}), {"decode": 1}, 0.0) == {"decode": 0}


def test_the_launcher_s_pools_add_free_names_and_retire_the_newest() -> None:
    values = {"model": "m", "redis_url": "redis://x", "prefill": 1, "decode": 2, "decode_max": 4, "pool_idle_s": 1.0}
    pools = ScaledPools.of(values)
    assert pools is not None
    metrics = RouterMetrics(list)
    metrics.active.set(1)
    kept = ["prefill-0", "decode-0", "decode-2", "router", "router-1"]
    status = Status(node_id="d", epoch=1, num_waiting=14)
    full = RouterMetrics(lambda: [NodeView(NodeInfo(node_id="d", epoch=1, role="decode"), status)])
    full.active.set(1)
    added, retired = pools.look({"router": full.exposition().decode()}, kept, [*kept, "decode-1"], 0.0)
    assert ([plan.name for plan in added], retired) == (["decode-3", "decode-4"], [])
    assert {(plan.node_id == plan.name, plan.is_local) for plan in added} == {(True, False)}
    pools.look({"router": metrics.exposition().decode(), "router-1": ""}, kept, kept, 10.0)
    assert pools.look({"router": metrics.exposition().decode(), "router-1": ""}, kept, kept, 12.0) == ([], ["decode-2"])
    assert pools.look({"router": ""}, kept, kept, 20.0) == ([], [])
    assert ScaledPools.of({"prefill": 1, "decode": 1}) is None
