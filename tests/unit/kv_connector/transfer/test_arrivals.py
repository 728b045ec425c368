"""What a step waits for on CPU, and what lets it go on."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVLayers, KVReady, KVRelease
from tandem.kv_connector.protocol.jobs import ArrivingKV
from tandem.kv_connector.transfer.arrivals import LET_GO, Arrivals, Arriving

NUM_LAYERS, STEP, SLOT = 3, 7, 2
GRANT = KVGrant(
    request_id="r", attempt=1, grant_id=5, source_id="h", source_epoch=8, sink_id="p", sink_epoch=9, first_block=0,
    block_ids=(1, 2), num_prompt_tokens=8, lease_s=1.0, signature=b"genuine",
)  # fmt: skip


def layers(number: int, signature: bytes = b"genuine") -> KVLayers:
    return KVLayers(request_id="r", attempt=1, grant_id=5, grant_signature=signature, source_epoch=8, num_layers=number)


def ready(signature: bytes = b"genuine") -> KVReady:
    return KVReady(
        request_id="r", attempt=1, grant_id=5, grant_signature=signature, source_id="h", source_epoch=8, sink_epoch=9,
        first_tokens=(), digests=b"",
    )  # fmt: skip


def waiting(within_s: float = 1e6) -> tuple[Arrivals, Callable[[], None]]:
    """Arrivals for which a step waits, and what waits for all its layers."""
    arrivals = Arrivals(NUM_LAYERS, torch.device("cpu"))
    arrivals.expect(GRANT)
    events = arrivals.events(STEP, [ArrivingKV(5, SLOT, time.monotonic() + within_s)])
    assert sorted(events) == list(range(NUM_LAYERS))

    def wait() -> None:
        for layer in range(NUM_LAYERS):
            for event in events[layer]:
                event.wait()

    return arrivals, wait


def test_layers_that_have_come_are_not_waited_for() -> None:
    arrivals, wait = waiting()
    for number in range(1, NUM_LAYERS + 1):
        arrivals.hear(layers(number))
    arrivals.source_lost(NodeKey("h", 8))
    arrivals.end(5)
    wait()
    assert arrivals.spoiled(STEP) == {}


def test_a_ready_says_that_all_have_come() -> None:
    arrivals, wait = waiting()
    arrivals.hear(ready())
    wait()
    assert arrivals.spoiled(STEP) == {}


@pytest.mark.parametrize(
    "let_go",
    [
        lambda arrivals: arrivals.end(5),
        lambda arrivals: arrivals.source_lost(NodeKey("h", 8)),
        lambda arrivals: arrivals.expire(time.monotonic() + 2e6),
        lambda arrivals: arrivals.hear(KVRelease(request_id="r", attempt=1, source_epoch=8, reason="")),
    ],
)
def test_what_does_not_come_spoils_the_row_and_holds_up_nobody(let_go: Callable[[Arrivals], None]) -> None:
    arrivals, wait = waiting()
    arrivals.hear(layers(NUM_LAYERS - 1))
    let_go(arrivals)
    wait()
    assert list(arrivals.spoiled(STEP)) == [SLOT]
    assert arrivals.spoiled(STEP) == {}, "it is told once"


def test_a_deadline_needs_nobody_who_calls() -> None:
    arrivals, wait = waiting(within_s=0.01)
    wait()
    assert list(arrivals.spoiled(STEP)) == [SLOT]


def test_strangers_let_nothing_go() -> None:
    arrivals, wait = waiting(within_s=0.01)
    arrivals.hear(layers(NUM_LAYERS, b"forged"))
    arrivals.hear(ready(b"forged"))
    arrivals.source_lost(NodeKey("h", 7))
    wait()
    assert list(arrivals.spoiled(STEP)) == [SLOT]


def test_a_grant_that_ended_before_the_step_spoils_it() -> None:
    arrivals = Arrivals(NUM_LAYERS, torch.device("cpu"))
    events = arrivals.events(STEP, [ArrivingKV(5, SLOT, time.monotonic() + 1e6)])
    events[0][0].wait()
    assert list(arrivals.spoiled(STEP)) == [SLOT]


def test_each_step_that_waits_hears_of_each_layer() -> None:
    """Two are launched at a time, and that the first has run takes nothing from the second."""
    arriving, flags = Arriving(GRANT), [torch.zeros(1, dtype=torch.int32) for _ in range(2)]
    arriving.note(1)
    for step_id, flag_1 in enumerate(flags):
        arriving.await_until(step_id, 5.0 - step_id, flag_1)
    assert arriving.deadline == 4.0
    arriving.note(2)
    assert [int(flag_1) for flag_1 in flags] == [2, 2]
    arriving.has_run(0)
    assert arriving.let_go(NUM_LAYERS)
    assert [int(flag_1) for flag_1 in flags] == [2, LET_GO]
    arriving.has_run(1)
    assert (arriving.deadline, arriving.is_spoiled) == (0.0, True)
