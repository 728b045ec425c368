"""What a fleet lacks, and what it has to spare."""

from __future__ import annotations

import pytest

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import Targets
from tandem.engine.contracts.wire.work import NodeReport
from tandem.router.placing.elastic import Plan
from tandem.router.placing.fleet_need import FleetNeed, spare_share
from tandem.router.placing.outlook import Outlook

A, B = NodeKey("a", 1), NodeKey("b", 1)


def node(**fields: object) -> Outlook:
    report = NodeReport(1e-4, 1e-4, targets=Targets(2.0, 0.020), **fields)  # type: ignore[arg-type]
    return Outlook(A, report)


def plan(num_late: int, share_s: float) -> Plan:
    return Plan((A,), B, None, cost_s=1.0, own_s=1.0, num_late=num_late, share_s=share_s, due_s=2.0)


def test_work_that_can_not_be_in_time_is_what_the_fleet_lacks() -> None:
    need = FleetNeed()
    need.placed(None)
    need.placed(plan(0, 5.0))
    need.placed(plan(2, 1.5))
    assert need.figures()["late_work_seconds"] == 1.5


def test_streams_and_prompts_take_what_they_need_to_be_in_time() -> None:
    assert spare_share(node(), 0.0) == 1.0
    assert spare_share(node(num_streams=3, step_s=0.0095), 0.0) == pytest.approx(0.5)
    assert spare_share(node(prompts=((1.0, 10_000),)), 0.0) == pytest.approx(0.5)
    assert spare_share(node(prompts=((1.0, 90_000),)), 0.0) == 0.0


def test_what_is_spare_is_a_mean_of_the_last_minutes() -> None:
    need, idle, full = FleetNeed(), node(), node(num_streams=9, step_s=0.019)
    need.look([], 90.0)
    need.look([idle, idle, None], 100.0)
    assert need.spare_nodes == 2.0
    need.look([full, full], 101.0)
    assert 1.9 < need.spare_nodes < 2.0
    need.look([full, full], 1e4)
    assert need.spare_nodes == pytest.approx(0.0, abs=1e-9)
    need.look([], 2e4)
    assert need.spare_nodes == 0.0
