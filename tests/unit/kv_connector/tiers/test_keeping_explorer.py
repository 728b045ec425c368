"""In every order of events, within bounds, nodes that leave blocks to each other keep the last copy of each; and the
explorer finds rules that are broken (docs/verification.md)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from keeping_explorer import BrokenError, explore
from keeping_world import NotingPool, Setting

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window_blocks import WindowBlocks
from tandem.kv_connector.directory import peers_blocks
from tandem.kv_connector.directory.kept import KeptElsewhere, gives_way
from tandem.kv_connector.directory.peers_blocks import PeersBlocks
from tandem.kv_connector.directory.question import Question
from tandem.kv_connector.directory.records import NodeRecord
from tandem.kv_connector.directory.spare_blocks import SpareBlocks, is_kept
from tandem.kv_connector.tiers.write_back import WriteBack

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
# A row sees one block before it, or two, through window blocks.
WINDOWS = {
    setting.name: setting
    for setting in (
        Setting("a window of one block", TWO, (2, 2), 5, most_used=1, window=2, bare=(1, 1)),
        Setting("pools alone with windows", TWO, (2, 2), 5, 2, 0, most_used=1, most_aged=1, window=3, bare=(0, 1)),
        Setting("what slid out of windows", TWO, (3, 1), 6, depth=3, most_used=1, window=3, bare=(0, 0)),
        Setting("three pools with windows", ORDERED, (2, 2, 1), 5, 2, 0, most_used=1, window=3, bare=(0, 1, 0)),
    )
}
LARGE = {
    setting.name: setting
    for setting in (
        Setting("a prompt twice", TWO, (2, 2), num_blocks=2, most_used=1),
        Setting("pools alone, where one block ages, two requests", TWO, (2, 2), num_host=0, most_used=2, most_aged=1),
        Setting("a prompt and its beginning, two requests", TWO, (2, 1), most_used=2),
        Setting("a window of one block, one has all", TWO, (2, 2), 5, most_used=1, window=2, bare=(0, 1)),
        Setting("windows of all that there is", TWO, (2, 2), 4, most_used=1, window=2, bare=(0, 0)),
        Setting("windows of two blocks", TWO, (2, 2), 5, most_used=2, window=3, bare=(0, 1)),
        Setting("what slid out on both", TWO, (3, 3), 6, depth=3, most_used=1, window=3, bare=(0, 1)),
        Setting("what slid out, pools alone", TWO, (3, 3), 6, 3, 0, most_used=1, most_aged=1, window=3, bare=(0, 1)),
        Setting("three pools, two requests", ORDERED, (1, 1, 1), 1, 1, num_host=0, most_used=2, most_aged=1),
    )
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_last_copy_is_dropped_for_no_promise(name: str) -> None:
    report = explore(SETTINGS[name])
    print(name, report)
    assert report.num_states > 5000, "events must follow on each other"


@pytest.mark.parametrize("name", WINDOWS)
def test_nor_is_the_last_whole_window(name: str) -> None:
    report = explore(WINDOWS[name])
    print(name, report)
    assert report.num_states > 5000, "events must follow on each other"
    assert 1000 < report.num_bare < report.num_states, "blocks must become bare, and whole again"


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


def test_found_peers_that_have_a_block_without_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeptElsewhere, "is_end", KeptElsewhere.__contains__)
    for name in ("a window of one block", "pools alone with windows"):
        with pytest.raises(BrokenError, match="the last copy is lost"):
            explore(WINDOWS[name])


def test_found_peers_that_have_a_block_s_own_window_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of the block before it, which a row behind it sees as well."""
    monkeypatch.setattr(Question, "ends", lambda self, held, whole: {each for each in held if each in whole})
    with pytest.raises(BrokenError, match="the last copy is lost"):
        explore(WINDOWS["pools alone with windows"])


def test_found_a_window_put_together_from_what_two_peers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    held = PeersBlocks._held

    def held_by_all(peers: PeersBlocks, servers: Any, peer: NodeRecord, *asked: list[bytes]) -> Any:
        return tuple(
            set().union(*sets)
            for sets in zip(*(held(peers, servers, each, *asked) for each in peers._peers(servers)), strict=True)
        )

    monkeypatch.setattr(PeersBlocks, "_held", held_by_all)
    with pytest.raises(BrokenError, match="the last copy is lost"):
        explore(WINDOWS["three pools with windows"])


def test_found_window_blocks_left_through_which_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go before the blocks behind them, since they were passed before."""

    def is_left(back: WriteBack, block_hash: bytes) -> bool:
        assert back._kept is not None
        return is_kept(back._kept, back._pool, block_hash) and not back.is_only_way(block_hash)

    monkeypatch.setattr(WriteBack, "_is_left", is_left)
    with pytest.raises(BrokenError, match="the last copy is lost"):
        explore(WINDOWS["what slid out of windows"])


def test_found_peers_that_are_not_told_of_lost_window_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowBlocks, "turn", lambda windows, block_hash: None)
    with pytest.raises(BrokenError, match="peers are told what is not so"):
        explore(WINDOWS["pools alone with windows"])
