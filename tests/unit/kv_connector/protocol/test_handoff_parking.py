"""The source's parked prompts and its claims: neither pool may wait for the other (docs/protocol.md)."""

from __future__ import annotations

import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.reservations import Reservations
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.handoff import KVClaim
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.source.manager import SourceManager
from tests.fakes.handoff_duo import DEADLINE_S, Duo
from tests.fakes.handoff_nodes import BLOCK, KEYS


def state_of(duo: Duo, name: str) -> S:
    return duo.source.manager.ledger.records[name, 0].machine.state


def overtaken() -> Duo:
    """`small` is parked and its first claim is lost; `large` fills the source's pool, and the sink's but one block."""
    duo = Duo(source_blocks=4, sink_blocks=5)
    duo.source.manager.prompts._max_parked = 3
    duo.lost = {KVClaim}
    duo.submit("small", 2)
    duo.schedule()
    duo.compute()
    assert state_of(duo, "small") is S.PARKED_DONE
    duo.lost = set()
    duo.submit("large", 4)
    duo.schedule()
    return duo


def test_a_large_prompt_claims_when_the_parked_one_has_left() -> None:
    duo = overtaken()
    assert state_of(duo, "large") is S.IDLE
    for _ in range(10):
        duo.turn()
    assert duo.committed == {"small", "large"}
    assert set(duo.ends.values()) == {1}
    duo.check_whole()


def test_without_the_rule_each_pool_waits_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reservations, "may_claim", lambda self, num: True)
    duo = overtaken()
    assert state_of(duo, "large") is S.PUSHING, "its claim came first"
    while duo.now < DEADLINE_S:
        duo.turn()
    assert duo.committed == set()
    assert not duo.ends


def test_many_parked_prompts_and_a_large_claim_end_on_small_pools() -> None:
    """Whatever order claims get through in."""
    for num_lost in range(6):
        duo = Duo(source_blocks=5, sink_blocks=6)
        duo.source.manager.prompts._max_parked = 4
        names = ["a", "b", "large", "c", "d"]
        for index, name in enumerate(names):
            duo.lost = {KVClaim} if index < num_lost else set()
            duo.submit(name, 5 if name == "large" else 1)
            duo.schedule()
        duo.lost = set()
        for _ in range(20):
            duo.turn()
        assert duo.committed == set(names)
        duo.check_whole()


def test_new_prompts_do_not_park_before_one_that_waits_to_claim() -> None:
    duo = overtaken()
    duo.is_cut = True
    duo.submit_to_source("next", 1)
    duo.schedule()
    assert state_of(duo, "next") is S.CLAIMING, "it fits beside the parked one, but would keep the large one out"
    duo.source.manager.cancel(AttemptKey("large", 0), duo.now)
    duo.source.drop(("large", 0))
    duo.schedule()
    assert state_of(duo, "next") is S.PARKED


def test_a_prompt_claims_again_in_time_after_the_one_in_its_way_was_cancelled() -> None:
    duo = overtaken()
    duo.cancel("small")
    duo.schedule()
    assert state_of(duo, "large") is S.PUSHING


def test_a_prompt_is_granted_while_its_sink_keeps_blocks_for_it() -> None:
    """The scheduler starts it before others that lack room."""
    duo = Duo(source_blocks=4, sink_blocks=5)
    duo.is_cut = True
    duo.submit("a", 2)
    (request,) = duo.source.waiting
    prompts = duo.source.manager.prompts
    assert not prompts.is_granted(request)
    assert prompts.get_num_new_matched_tokens(request, 0) is None
    assert not prompts.is_granted(request)
    duo.is_cut = False
    duo.tick(6.0)
    assert prompts.is_granted(request)
    duo.turn()
    duo.turn()
    assert duo.committed == {"a"}
    assert not prompts.is_granted(request)


@pytest.mark.parametrize(("role", "most"), [("prefill", 6), ("unified", 2)])
def test_a_node_that_others_compute_for_parks_a_quarter_at_most(role: str, most: int) -> None:
    """Whatever it is told: half is promised, and a granted prompt of its own needs room."""
    cache, scheduler = CacheOptions(block_size=BLOCK, hash_block_size=BLOCK), SchedulerOptions(parked_kv_fraction=0.75)
    options = NodeOptions(role, ModelOptions("m"), cache, scheduler)  # type: ignore[arg-type]
    info = NodeInfo(node_id="a", epoch=1, role=role)  # type: ignore[arg-type]
    assert SourceManager(info, KEYS, BlockPool(8, enable_caching=True), options).prompts._max_parked == most
