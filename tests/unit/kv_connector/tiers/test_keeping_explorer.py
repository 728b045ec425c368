"""In every order of events, within bounds, nodes that leave blocks to each other keep the last copy of each; and the
explorer finds rules that are broken (docs/verification.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from keeping_explorer import BrokenError, explore
from keeping_world import NotingPool, Setting

from tandem.engine.blocks.pool import BlockPool
from tandem.kv_connector.directory import peers_blocks
from tandem.kv_connector.directory.kept import KeptElsewhere, gives_way
from tandem.kv_connector.directory.spare_blocks import SpareBlocks

ORDERED = tuple(sorted("abc", key=lambda name: sum(gives_way(other, name) for other in "abc" if other != name)))
TWO = ORDERED[:2]
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("a prompt and its beginning", TWO, (2, 1), most_used=1),
        Setting("pools alone, where one block ages", TWO, (2, 2), num_host=0, most_used=1, most_aged=1),
        Setting("three pools", ORDERED, (1, 1, 1), num_blocks=1, depth=1, num_host=0, most_used=1),
    )
}
LARGE = {
    setting.name: setting
    for setting in (
        Setting("a prompt twice", TWO, (2, 2), num_blocks=2, most_used=1),
        Setting("pools alone, where one block ages, two requests", TWO, (2, 2), num_host=0, most_used=2, most_aged=1),
        Setting("a prompt and its beginning, two requests", TWO, (2, 1), most_used=2),
        Setting("three pools, two requests", ORDERED, (1, 1, 1), 1, 1, num_host=0, most_used=2, most_aged=1),
    )
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_last_copy_is_dropped_for_no_promise(name: str) -> None:
    report = explore(SETTINGS[name])
    print(name, report)
    assert report.num_states > 5000, "events must follow on each other"


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_the_last_copy_is_dropped_for_no_promise_in_larger_settings(name: str) -> None:
    print(name, explore(LARGE[name]))


# --- the explorer finds what is broken ------------------------------------------------------------------------


def never(block_hash: bytes) -> bool:
    return False


def looks_at_pools_alone(pool: BlockPool, kept: KeptElsewhere, is_only_way: Callable[[bytes], bool]) -> SpareBlocks:
    return SpareBlocks(pool, kept, never)


class Trusting(KeptElsewhere):
    """Believes an answer for good."""

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._answer[1]


def test_found_two_that_leave_the_same_block_to_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_blocks, "gives_way", lambda own, other: own != other)
    with pytest.raises(BrokenError, match="the last copy is lost"):
        explore(SETTINGS["three pools"])


def test_found_what_host_memory_has_and_nobody_reaches() -> None:
    with pytest.raises(BrokenError, match="the last copy is lost"):
        explore(replace(SETTINGS["a prompt and its beginning"], make_spare=looks_at_pools_alone))


def test_found_what_goes_with_its_parent_though_nobody_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NotingPool, "children", lambda pool, block_hash: ())
    with pytest.raises(BrokenError, match=r"nobody said to keep"):
        explore(SETTINGS["pools alone, where one block ages"])


def test_found_answers_that_count_for_ever() -> None:
    with pytest.raises(BrokenError, match=r"nobody said to keep|old answer"):
        explore(replace(SETTINGS["pools alone, where one block ages"], make_kept=Trusting))
