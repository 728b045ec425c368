"""Slots for adapters: one in use is never taken, of the others the one unused for longest is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.blocks.adapter_slots import AdapterSlots
from tandem.engine.contracts.wire.parts import AdapterRef

A, B, C = (AdapterRef(f"/{name}", name.encode()) for name in "abc")


def test_an_unused_adapter_stays_until_its_slot_is_needed() -> None:
    slots = AdapterSlots(2)
    first = slots.take(A)
    assert slots.take(A) == first
    second = slots.take(B)
    assert dict(slots.take_loads()) == {first: A, second: B}
    assert not slots.may_take(C)
    slots.release(A)
    assert not slots.may_take(C), "another sequence has it still"
    slots.release(A)
    assert slots.take(A) == first
    assert slots.take_loads() == (), "it was there still"
    slots.release(A)
    slots.release(B)
    assert slots.take(C) == first, "A was released first"
    assert slots.take_loads() == ((first, C),)
    slots.check_integrity([C])


def test_what_was_never_brought_is_forgotten() -> None:
    slots = AdapterSlots(1)
    slots.take(A)
    slots.release(A)
    assert slots.take_loads() == ()
    assert slots.take(B) == 1
    assert slots.take_loads() == ((1, B),)


def test_the_model_alone_needs_no_slot() -> None:
    slots = AdapterSlots(0)
    assert slots.may_take(None)
    assert slots.take(None) == 0
    slots.release(None)
    assert not slots.may_take(A)


@pytest.mark.parametrize("num_slots", [1, 3])
@settings(max_examples=25)
@given(todo=st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=60))
def test_whoever_runs_finds_its_adapter_in_its_slot(num_slots: int, todo: list[tuple[int, bool, bool]]) -> None:
    slots, running, device = AdapterSlots(num_slots), [], {}
    for number, leaves, steps in todo:
        ref = AdapterRef(str(number), bytes([number]))
        if leaves and running:
            left, _ = running.pop(number % len(running))
            slots.release(left)
        elif slots.may_take(ref):
            running.append((ref, slots.take(ref)))
        if steps:
            device.update(slots.take_loads())
            assert all(device[slot] == held for held, slot in running)
        slots.check_integrity([held for held, _ in running])
