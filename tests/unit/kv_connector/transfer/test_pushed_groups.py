"""Which layers of which block table are pushed once a layer of the model is written."""

from __future__ import annotations

import pytest

from tandem.engine.contracts.kv_layout import LayerPlace, places_of_layers, push_groups
from tandem.kv_connector.transfer.layer_hooks import _ends_of_groups

PATTERNS = {
    "all alike": [None] * 9,
    "one of each": [None, 8] * 12,
    "five to one": ([8] * 5 + [None]) * 6,
    "a rest": ([8] * 5 + [None]) * 10 + [8, 8],  # Gemma-3 with 27 billion: 52 to 10
}


@pytest.mark.parametrize("windows", PATTERNS.values(), ids=PATTERNS)
def test_each_layer_of_each_table_is_pushed_once_when_it_is_written(windows: list[int | None]) -> None:
    places = list(places_of_layers(windows)) or [LayerPlace(0, index) for index in range(len(windows))]
    num_layers = 1 + max(place.layer for place in places)
    ends = _ends_of_groups(places, push_groups(num_layers), num_layers)
    written: set[tuple[int, int]] = set()
    pushed: list[tuple[int, int]] = []
    for index, place in enumerate(places):
        written.add((place.table, place.layer))
        for layer in ends.get(index, ()):
            is_left_empty = LayerPlace(place.table, layer) not in places
            assert is_left_empty or (place.table, layer) in written, "it is pushed before it is written"
            pushed.append((place.table, layer))
    tables = range(1 + max(place.table for place in places))
    assert sorted(pushed) == [(table, layer) for table in tables for layer in range(num_layers)]
