"""Which layers of which block table are pushed once a layer of the model is written, and who waits for them."""

from __future__ import annotations

import pytest

from tandem.engine.contracts.kv_layout import LAYERS_TOGETHER, LayerPlace, places_of_layers
from tandem.kv_connector.transfer.layer_order import LayerOrder

PATTERNS = {
    "all alike": [None] * 9,
    "one of each": [None, 8] * 12,
    "five to one": ([8] * 5 + [None]) * 6,
    "a rest": ([8] * 5 + [None]) * 10 + [8, 8],  # Gemma-3 with 27 billion: 52 to 10
}


@pytest.mark.parametrize("num_heads", [0, 1])
@pytest.mark.parametrize("windows", PATTERNS.values(), ids=PATTERNS)
def test_each_layer_of_each_table_is_pushed_once_when_it_is_written(windows: list[int | None], num_heads: int) -> None:
    windows = [*windows, *[None] * num_heads]
    places = list(places_of_layers(windows, num_heads)) or [LayerPlace(0, index) for index in range(len(windows))]
    num_layers = 1 + max(place.layer for place in places)
    ends = LayerOrder(places, num_layers).pushed
    written: set[tuple[int, int]] = set()
    pushed: list[tuple[int, int]] = []
    for index, place in enumerate(places):
        written.add((place.table, place.layer))
        for layer in ends.get(index, ()):
            is_left_empty = LayerPlace(place.table, layer) not in places
            assert is_left_empty or (place.table, layer) in written, "it is pushed before it is written"
            pushed.append((place.table, layer))
        due = {(each.table, each.layer) for each in places[: max(0, index + 2 - LAYERS_TOGETHER)]}
        assert due <= set(pushed), "nobody waits for more layers than are pushed together"
    tables = range(1 + max(place.table for place in places))
    assert sorted(pushed) == [(table, layer) for table in tables for layer in range(num_layers)]


@pytest.mark.parametrize("num_heads", [0, 1])
@pytest.mark.parametrize("windows", PATTERNS.values(), ids=PATTERNS)
def test_a_layer_is_read_when_it_has_come_and_no_later(windows: list[int | None], num_heads: int) -> None:
    windows = [*windows, *[None] * num_heads]
    places = list(places_of_layers(windows, num_heads)) or [LayerPlace(0, index) for index in range(len(windows))]
    order = LayerOrder(places, 1 + max(place.layer for place in places))
    come: set[LayerPlace] = set()
    read, num_told = 0, 0

    def may_read(layer: int) -> bool:
        return num_told >= max((num for first, num in order.awaited.items() if first <= layer), default=0)

    for index in range(len(places)):
        come |= {LayerPlace(places[index].table, layer) for layer in order.pushed.get(index, ())}
        num_told = order.told.get(index, num_told)
        while read < len(places) and may_read(read):
            assert places[read] in come, "it is read before it has come"
            read += 1
        assert read == len(places) or places[read] not in come, "it has come, and is not read"
    assert (read, num_told) == (len(places), len(places))
