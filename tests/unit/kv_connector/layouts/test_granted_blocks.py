"""The list of a grant whose blocks have window blocks from some place on."""

from __future__ import annotations

import pytest

from tandem.kv_connector.layouts.granted_blocks import GrantedBlocks


@pytest.mark.parametrize("each", [1, 2, 4])
@pytest.mark.parametrize(("first", "first_window"), [(0, 0), (0, 3), (2, 0), (2, 5), (4, 4), (0, 7)])
def test_each_block_has_its_place_and_no_two_have_one(first: int, first_window: int, each: int) -> None:
    blocks = GrantedBlocks(first, first_window, each)
    listed = list(blocks.entries(range(first, 8)))
    assert [blocks.index(entry) for entry in listed] == list(range(len(listed)))
    assert blocks.count(8) == len(listed)
    assert blocks.count(first) == 0
    for end in range(first, 9):
        assert blocks.count(end) == len(list(blocks.entries(range(first, end)))), "what leads the list is whole"
    bare = [block for block, table in listed if table == 0 and (block, 1) not in listed]
    assert bare == [block for block in range(first, 8) if each == 1 or block < first_window]
