"""What is loaded of a prompt where a row behind it needs whole blocks for its window."""

from __future__ import annotations

import pytest

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import BlockWindow
from tandem.kv_connector.tiers.usable_load import usable_load

HASHES = [bytes([index]) * 16 for index in range(8)]


@pytest.mark.parametrize(
    ("pool_has", "below_has", "num_usable", "expected"),
    [
        ("", "bbbbWW", 0, (0, 6)),
        ("", "bbbbWb", 0, (0, 0)),  # nobody could begin behind the fifth: it needs the fourth
        ("", "WWbbbb", 0, (0, 2)),
        ("bbb", "...bWW", 0, (3, 6)),
        ("bbb", "..WW..", 0, (2, 4)),  # the third is loaded again, with its window blocks
        ("bbW", "...W..", 0, (3, 4)),  # it is there
        ("bWW", "......", 3, (3, 3)),
        ("bWW", "...b..", 3, (3, 3)),
        ("bbb", "......", 0, (3, 3)),
    ],
)
def test_as_much_as_ends_in_a_window_that_is_whole(
    pool_has: str, below_has: str, num_usable: int, expected: tuple[int, int]
) -> None:
    """`b`: without window blocks, `W`: with them."""
    pool = BlockPool(32, True, window=BlockWindow(8, 4, 1))
    blocks = [pool.allocate(1, int(each == "b")) for each in pool_has]
    known = [block_id for each in blocks if each is not None for block_id in each]
    num_below = len(below_has[len(known) :].rstrip("."))
    is_whole = dict(zip(HASHES, (each == "W" for each in below_has), strict=False))
    first, found = usable_load(pool, lambda each: is_whole.get(each, False), HASHES, known, num_below, num_usable)
    assert (first, first + len(found)) == expected
    assert found == HASHES[first : expected[1]]
