"""What every serving node does with routers' messages, on a real scheduler and pool."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from tandem.decode_node.node import DecodeNode
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.contracts.wire.requests import Accepted, Cancel, Cancelled, FlushBlocks, RequestFailed, Submit
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.ports import NoTiers
from tandem.engine.scheduling.prompt_order import ArrivalOrder, SlackOrder
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.step_pace import next_prompt_decision_at
from tandem.node.control.events import PeerLost, Received
from tandem.node.handoffs import Handoffs
from tandem.node.requests import RequestBook
from tandem.node.serving import ServingNode
from tandem.prefill_node.node import PrefillNode

ROUTER = NodeKey("router", 1)
INFO = NodeInfo(node_id="node", epoch=7, role="unified")


def make_node(max_queue: int = 4, kind: type[ServingNode] = ServingNode, **state: Any) -> ServingNode:
    pool = BlockPool(16, True)
    scheduler = Scheduler(
        SchedulerState(
            SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64),
            pool,
            block_size=4,
            max_model_len=64,
            eos_token_ids=[7],
            root_for_salt=lambda salt: root_hash(b"model", salt),
            **state,
        )
    )
    options = NodeOptions("unified", ModelOptions("m"), CacheOptions(block_size=4, hash_block_size=4))
    handoffs = Handoffs(INFO, ClusterKeys(b"k" * 16, False), pool, options, NoTiers(), Rate())
    return kind(INFO, RequestBook(100, 64), scheduler, pool, max_queue, handoffs)


def submit(request_id: str, **fields: object) -> Submit:
    tokens = np.arange(1, 7, dtype="<i4").tobytes()
    fields = {"attempt": 0, "mode": "full", "prompt_token_ids": tokens, "sampling": SamplingParams(), **fields}
    return Submit(request_id=request_id, **fields)  # type: ignore[arg-type]


def say(node: ServingNode, *messages: object) -> list:
    """Answers to `messages` of the router."""
    for message in messages:
        node.on_control(Received(ROUTER, message), 0.0)  # type: ignore[arg-type]
    node.check_integrity()
    return [message for _, message in node.drain_outbox()]


def failure(answers: list) -> tuple[str, bool]:
    (answer,) = answers
    assert isinstance(answer, RequestFailed)
    return answer.code, answer.retryable


def test_a_mode_of_another_role_is_refused() -> None:
    node = make_node()
    for mode in ("prefill", "decode"):
        assert failure(say(node, submit(mode, mode=mode))) == ("wrong_role", True)
    assert node.is_empty


def test_a_draining_node_finishes_what_it_has_and_takes_nothing_new() -> None:
    node = make_node()
    assert say(node, submit("old")) == [Accepted(request_id="old", attempt=0)]
    node.drain()
    assert failure(say(node, submit("new"))) == ("draining", True)
    assert say(node, submit("old")) == [Accepted(request_id="old", attempt=0)], "a duplicate is no new request"
    assert node.status({}).draining
    assert not node.is_empty
    say(node, Cancel(request_id="old", attempt=0))
    assert node.is_empty


def test_a_full_queue_is_refused_but_not_a_duplicate() -> None:
    node = make_node(max_queue=2)
    say(node, submit("a"), submit("b"))
    assert failure(say(node, submit("c"))) == ("overloaded", True)
    assert say(node, submit("a")) == [Accepted(request_id="a", attempt=0)]
    say(node, Cancel(request_id="a", attempt=0))
    assert say(node, submit("c")) == [Accepted(request_id="c", attempt=0)], "a refusal left a tombstone"


def test_a_newer_attempt_stops_the_older_ones() -> None:
    node = make_node()
    say(node, submit("r"), submit("other"))
    answers = say(node, submit("r", attempt=1))
    assert answers == [Cancelled(request_id="r", attempt=0), Accepted(request_id="r", attempt=1)]
    assert set(node.book.entries) == {("r", 1), ("other", 0)}
    assert len(node.scheduler.state.queues.waiting) == 2


def test_a_lost_router_and_a_passed_deadline_leave_the_scheduler_empty() -> None:
    node = make_node()
    say(node, submit("a", deadline_s=5.0), submit("b"))
    node.on_tick(4.9)
    assert len(node.scheduler.state.queues.waiting) == 2
    node.on_tick(5.0)
    assert failure([message for _, message in node.drain_outbox()]) == ("deadline_exceeded", False)
    assert len(node.scheduler.state.queues.waiting) == 1
    node.on_control(PeerLost(NodeInfo(node_id="router", epoch=1, role="router"), "silent"), 6.0)
    assert node.is_empty
    assert node.drain_outbox() == []


def test_a_cancelled_sample_leaves_the_others() -> None:
    node = make_node()
    say(node, submit("r", sample_indices=(0, 1)))
    say(node, Cancel(request_id="r", attempt=0, sample_indices=(0,)))
    assert node.scheduler.state.queues.waiting[0].sample_indices == (1,)
    say(node, Cancel(request_id="r", attempt=0, sample_indices=(1,)))
    assert node.is_empty


def test_flush_empties_the_cache_only() -> None:
    node = make_node()
    say(node, submit("r"))
    (block,) = node.pool.allocate(1) or ()
    node.pool.register(block, b"h" * 16, None, None)
    node.pool.free([block], None)
    assert node.status({}).counters["blocks_cached"] == 1
    say(node, FlushBlocks())
    assert node.status({}).counters["blocks_cached"] == 0
    assert len(node.scheduler.state.queues.waiting) == 1


def test_a_node_reports_what_it_measured_and_nothing_before() -> None:
    """4 blocks of 4 tokens pushed in 8 ms: 0.5 ms a token."""
    node = make_node()
    assert (node.status({}).prefill_s_per_token, node.status({}).transfer_s_per_token) == (0.0, 0.0)
    layout = KVLayout((KVGroup(num_layers=2, num_kv_heads=1, head_dim=8, dtype="float16"),), block_size=4)
    node.info = msgspec.structs.replace(INFO, layout=layout)
    counters = {"kv_pushed_bytes": 4.0 * layout.payload_bytes, "kv_push_s": 0.008}
    assert node.status(counters).transfer_s_per_token == pytest.approx(0.0005)


def test_an_invalid_newer_attempt_stops_nothing() -> None:
    node = make_node()
    say(node, submit("r"))
    assert failure(say(node, submit("r", attempt=1 << 40))) == ("invalid_request", False)
    assert failure(say(node, submit("r", attempt=1, deadline_s=float("nan")))) == ("invalid_request", False)
    assert set(node.book.entries) == {("r", 0)}


def test_a_far_newer_attempt_stops_the_older_ones_at_once() -> None:
    node = make_node()
    answers = say(node, submit("r"), submit("r", attempt=(1 << 31) - 1))
    assert answers[1:] == [Cancelled(request_id="r", attempt=0), Accepted(request_id="r", attempt=(1 << 31) - 1)]


def test_a_request_that_cannot_be_started_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    node = make_node()
    add = node.scheduler.state.add

    def fail_late(request: object) -> None:
        add(request)  # type: ignore[arg-type]
        raise KeyError("nobody expected this")

    with monkeypatch.context() as patch:
        patch.setattr(node.scheduler.state, "add", fail_late)
        assert failure(say(node, submit("bad"))) == ("internal_error", True)
    assert node.is_empty
    assert say(node, submit("good")) == [Accepted(request_id="good", attempt=0)]


@pytest.mark.parametrize("kind", [PrefillNode, DecodeNode])
def test_behind_prompts_alone_the_next_step_is_decided_late(kind: type[ServingNode]) -> None:
    now = [100.0]
    clock = StepClock(lambda: now[0], by_size=kind is DecodeNode)
    node = make_node(kind=kind, clock=clock, prompt_order=SlackOrder(0.3, clock))
    clock.launched(0, 2048, 2048)
    now[0] += 0.05
    clock.completed(0)
    assert node.launch_at() < now[0], "nothing runs"
    clock.launched(1, 2048, 2048)
    assert node.launch_at() == next_prompt_decision_at(clock)
    assert node.launch_at() > now[0] + 0.03


@pytest.mark.parametrize(("num_prompt_tokens", "has_deadlines"), [(2047, True), (2048, False)])
def test_beside_streams_or_without_deadlines_it_is_decided_at_once(num_prompt_tokens: int, has_deadlines: bool) -> None:
    now = [100.0]
    clock = StepClock(lambda: now[0])
    order = SlackOrder(0.3, clock) if has_deadlines else ArrivalOrder()
    node = make_node(kind=DecodeNode, clock=clock, prompt_order=order)
    clock.launched(0, 2048, 2048)
    now[0] += 0.05
    clock.completed(0)
    clock.launched(1, 2048, num_prompt_tokens)
    assert node.launch_at() < now[0]
