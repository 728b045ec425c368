"""In which order layers are pushed while a prompt is computed, and what a layer waits for that a peer computes. Pure.

Some layers of the model, one behind the other, go together; of each block table by itself, since layers that slide have
blocks of their own (LayerPlace). So a layer may go later than others that are computed behind it. How far a source is
can be told in one number all the same: how many of the model's first layers have gone. The sink computes them in just
this order.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.contracts.kv_layout import KVGroup, LayerPlace, push_groups


class LayerOrder:
    """`pushed`: the layers of the model that are the last of a group in their block table, each with that group, layers
    of the pool that are pushed once it is written. `told`: how many of the model's first layers have gone with it, if
    they are more than before. `awaited`: before which layers a step waits for what comes from a peer, and until how
    many of the first ones have come: all that is read up to the next such layer is there then."""

    def __init__(self, places: Sequence[LayerPlace], num_pool_layers: int) -> None:
        """`places` are those of the model's layers, in their order."""
        self.num_layers = len(places)
        self.pushed = _ends_of_groups(places, num_pool_layers)
        ends = sorted(self.pushed)
        goes_with = [
            next(end for end in ends if end >= index and places[end].table == place.table)
            for index, place in enumerate(places)
        ]

        def num_gone(with_layer: int) -> int:
            return next((index for index, end in enumerate(goes_with) if end > with_layer), self.num_layers)

        self.told = _increases({end: num_gone(end) for end in ends})
        self.awaited = _increases({index: num_gone(max(goes_with[: index + 1])) for index in range(self.num_layers)})


def order_of(group: KVGroup) -> LayerOrder:
    """The order of the layers of a whole pool."""
    return LayerOrder(group.places or [LayerPlace(0, layer) for layer in range(group.num_layers)], group.num_layers)


def _ends_of_groups(places: Sequence[LayerPlace], num_pool_layers: int) -> dict[int, range]:
    """See LayerOrder. What a table has no layers for goes with its last."""
    ends: dict[int, range] = {}
    begin = dict.fromkeys((place.table for place in places), 0)
    last_of_table = {place.table: index for index, place in enumerate(places)}
    for group in push_groups(len(places)):
        for index in {places[index].table: index for index in group}.values():
            table, layer = places[index].table, places[index].layer
            stop = num_pool_layers if index == last_of_table[table] else layer + 1
            ends[index], begin[table] = range(begin[table], stop), stop
    return ends


def _increases(numbers: dict[int, int]) -> dict[int, int]:
    """Returns those that are larger than all before."""
    found: dict[int, int] = {}
    for key, number in numbers.items():
        if number > max(found.values(), default=0):
            found[key] = number
    return found
