"""Two nodes that do all work compute prompts for each other: whatever comes first, all of them end and each pool is
whole (docs/blocks.md, "Two pools that wait for each other"). And each rule that sees to it is broken on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.kv_connector.sink.line import SinkLine
from tandem.kv_connector.source import manager
from tandem.kv_connector.source.prompts import PushedPrompts
from tandem.router.placing.elastic_finder import MOST_OF_POOL
from tests.worlds.explorer import explore
from tests.worlds.setting import Setting, ViolationError

LARGEST = int(4 * MOST_OF_POOL)  # that a router hands over between pools of four blocks
TWO_EACH: Any = {"ways": ("ab", "ab", "ba", "ba"), "priorities": (0,) * 4}


def exchange(name: str, num_blocks: int, granted: tuple[int, ...], **options: Any) -> Setting:
    """Between pools of `num_blocks`. Parked is as much as the option lets: all of the pool."""
    return Setting(
        name,
        **{
            "granted": granted, "hits": (0,) * len(granted), "source_blocks": num_blocks, "sink_blocks": num_blocks,
            "max_parked": num_blocks, "submitted": True, "is_calm": True, "max_faults": 0, **TWO_EACH, **options,
        },
    )  # fmt: skip


# Half of a pool each: nothing can be parked, and both pools are full when both have promised.
HALVES = exchange("halves", 2, (1,) * 4)
QUARTERS = exchange("quarters, one parked", 4, (LARGEST,) * 4)
HITS = exchange("hits of what is granted", 6, (1, 2) * 2, hits=(2, 0) * 2)
TICKETS = exchange("hits of tickets", 4, (2, 1) * 2, hits=(0, 1) * 2, max_parked=0)
# What "b" computes itself it may pull: "a" keeps that for it, beside a parked prompt.
OFFER = exchange("an offer", 4, (3, 1, 1), ways=("ab",) * 3, pulls=(2,), priorities=(0,) * 3)
ONE_EACH: Any = {"ways": ("ab", "ba"), "priorities": (0, 0), "max_faults": 1}
POOL_FAULTS = frozenset({"lose", "lease", "crash_source"})
# What a router does not hand over.
LARGER = exchange("one larger than a quarter", 4, (LARGEST + 1, LARGEST) * 2)
LARGEST_OF_ALL = exchange("larger than half", 4, (3, 3), ways=("ab", "ba"), priorities=(0, 0))

QUICK = [
    (exchange("halves, two and one", 2, (1,) * 3, ways=("ab", "ab", "ba"), priorities=(0,) * 3), 500),
    (exchange("one each, loss, lease or crash", 2, (1, 1), **ONE_EACH, faults=POOL_FAULTS), 2_000),
]
SLOW = [
    (HALVES, 3_000),
    (OFFER, 2_000),
    (QUARTERS, 20_000),
    (HITS, 10_000),
    (TICKETS, 10_000),
    (exchange("one each, any fault", 2, (1, 1), **ONE_EACH), 10_000),
    (exchange("one each, any fault, receiver writes", 2, (1, 1), **ONE_EACH, one_sided=False), 10_000),
]


@pytest.mark.parametrize(
    ("setting", "min_states"),
    [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_nobody_waits_for_ever(setting: Setting, min_states: int) -> None:
    report = explore(setting)
    print(setting.name, report.num_states, report.num_transitions, report.num_lives)
    assert report.num_states >= min_states
    done = frozenset({("p", "committed"), ("d", "committed")})
    assert done in report.outcomes
    assert setting.max_faults or report.outcomes == {done}


def _all(right: Any, *args: Any) -> bool:
    return True


def _none(right: Any, *args: Any) -> bool:
    return False


def _what_is_granted(right: Any, self: SinkLine, head: Any, needed: int) -> bool:
    promised = sum(len(record.granted) for record in self._ledger.live.values())
    return not promised or promised + needed <= self._most_promised


def _behind_the_line(right: Any, self: SinkLine) -> None:
    if not self._queue:
        right(self)


# name: (whose, what, its stand-in, which gets the right one first; the setting)
MUTATIONS: dict[str, tuple[Any, str, Any, Setting]] = {
    "all of the pool is promised": (SinkLine, "_may_promise", _all, HALVES),
    "hits of what is granted don't count": (SinkLine, "_may_promise", _what_is_granted, HITS),
    "a granted prompt asks as any other": (PushedPrompts, "is_granted", _none, TICKETS),
    "pulls wait behind the line": (SinkLine, "_grant_pulls", _behind_the_line, OFFER),
}


TAKE_LONG = ("pulls wait behind the line", "hits of what is granted don't count", "a granted prompt asks as any other")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in TAKE_LONG else name for name in MUTATIONS]
)
def test_each_mutation_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, what, instead, setting = MUTATIONS[name]
    right = getattr(owner, what)
    monkeypatch.setattr(owner, what, lambda *args: instead(right, *args))
    with pytest.raises(ViolationError, match="waits for ever"):
        explore(setting)


@pytest.mark.slow
def test_more_than_a_quarter_parked_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager, "MOST_PARKED", 1.0)
    with pytest.raises(ViolationError, match="waits for ever"):
        explore(HALVES)


@pytest.mark.parametrize("setting", [LARGEST_OF_ALL, pytest.param(LARGER, marks=pytest.mark.slow)])
def test_prompts_larger_than_a_router_hands_over_are_found(setting: Setting) -> None:
    with pytest.raises(ViolationError, match="waits for ever"):
        explore(setting)
