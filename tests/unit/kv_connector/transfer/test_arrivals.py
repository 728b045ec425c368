"""What a step waits for on CPU, and what lets it go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup
from tandem.engine.contracts.wire.handoff import KVGrant, KVLayers, KVReady, KVRelease
from tandem.kv_connector.protocol.jobs import ArrivingKV
from tandem.kv_connector.transfer import arrivals as arrivals_of
from tandem.kv_connector.transfer.arrivals import LET_GO, Arrivals, Arriving
from tandem.kv_connector.transfer.layer_order import order_of

NUM_LAYERS, STEP, SLOT = 3, 7, 2
GRANT = KVGrant(
    request_id="r", attempt=1, grant_id=5, source_id="h", source_epoch=8, sink_id="p", sink_epoch=9, first_block=0,
    block_ids=(1, 2), num_prompt_tokens=8, lease_s=1.0, signature=b"genuine",
)  # fmt: skip


def arrivals_of_layers(num_layers: int) -> Arrivals:
    return Arrivals(order_of(KVGroup(num_layers, 1, 1, "float32")), torch.device("cpu"))


def layers(number: int, signature: bytes = b"genuine") -> KVLayers:
    return KVLayers(request_id="r", attempt=1, grant_id=5, grant_signature=signature, source_epoch=8, num_layers=number)


def ready(signature: bytes = b"genuine") -> KVReady:
    return KVReady(
        request_id="r", attempt=1, grant_id=5, grant_signature=signature, source_id="h", source_epoch=8, sink_epoch=9,
        first_tokens=(), digests=b"",
    )  # fmt: skip


def waiting(within_s: float = 1e6) -> tuple[Arrivals, Callable[[], None]]:
    """Arrivals for which a step waits, and what waits for all its layers."""
    arrivals = arrivals_of_layers(NUM_LAYERS)
    arrivals.expect(GRANT)
    waits = arrivals.waits(STEP, [ArrivingKV(5, SLOT, time.monotonic() + within_s)])
    assert sorted(waits) == [0, 2], "the first of each group that is pushed together"

    def wait() -> None:
        for layer in range(NUM_LAYERS):
            for each in waits.get(layer, ()):
                each.on_stream()  # on CPU the host waits

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
    arrivals = arrivals_of_layers(NUM_LAYERS)
    assert arrivals.waits(STEP, [ArrivingKV(5, SLOT, time.monotonic() + 1e6)]) == {}, "nobody waits for it"
    assert list(arrivals.spoiled(STEP)) == [SLOT]


def test_a_step_waits_for_what_has_not_come_when_it_is_launched() -> None:
    arrivals, _ = waiting()
    needed = [ArrivingKV(5, SLOT, time.monotonic() + 1e6)]
    arrivals.hear(layers(2))
    assert sorted(arrivals.waits(STEP + 1, needed)) == [2]
    assert arrivals.are_missing
    arrivals.hear(layers(3))
    assert arrivals.waits(STEP + 2, needed) == {}
    assert not arrivals.are_missing
    assert [arrivals.spoiled(step) for step in (STEP, STEP + 1, STEP + 2)] == [{}, {}, {}]


def test_what_will_not_come_is_missing_no_more() -> None:
    arrivals, _ = waiting()
    assert arrivals.are_missing
    arrivals.end(5)
    assert not arrivals.are_missing


def on_a_device(monkeypatch: pytest.MonkeyPatch, waited: list[int]) -> Arrivals:
    """Arrivals of 16 layers as on a device, whose streams note in `waited` for how many layers they wait."""
    monkeypatch.setattr(arrivals_of, "wait_for_value", lambda index, stream, address, value: waited.append(value))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    arrivals = arrivals_of_layers(16)
    arrivals._flags, arrivals._device = torch.zeros(4, dtype=torch.int32), torch.device("cuda", 0)
    arrivals.expect(GRANT)
    return arrivals


def test_a_stream_waits_for_each_group_of_layers_for_some_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    arrivals = on_a_device(monkeypatch, waited)
    for waits in arrivals.waits(STEP, [ArrivingKV(5, SLOT, time.monotonic() + 1e6)]).values():
        for each in waits:
            each.on_stream()
    assert waited == [4, 8, 12, 15, 16], "the last layer goes alone"
    arrivals.expire(time.monotonic() + arrivals_of.MOST_DEVICE_WAIT_S)
    assert not arrivals.are_missing
    assert list(arrivals.spoiled(STEP)) == [SLOT], "long before its own deadline"


def test_a_host_waits_for_what_steps_before_wait_for_and_for_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    arrivals, needed = on_a_device(monkeypatch, waited), [ArrivingKV(5, SLOT, time.monotonic() + 1e6)]
    first, second = (arrivals.waits(step, needed) for step in (STEP, STEP + 1))
    for each in (each for waits in first.values() for each in waits):
        each.on_stream()
    passed: list[str] = []

    def launch() -> None:
        arrivals.settle(STEP)
        passed.append("nothing before the first step")
        second[0][0].on_host()
        passed.append("layers of the second")
        arrivals.settle(STEP + 1)
        passed.append("the first step")

    thread = threading.Thread(target=launch, daemon=True)
    thread.start()
    wait_until(lambda: len(passed) == 1)
    arrivals.hear(layers(4))
    wait_until(lambda: len(passed) == 2)
    assert arrivals.are_missing
    assert len(passed) == 2
    arrivals.hear(layers(16))
    thread.join(PATIENCE_S)
    assert len(passed) == 3
    assert arrivals.spoiled(STEP) == arrivals.spoiled(STEP + 1) == {}


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
