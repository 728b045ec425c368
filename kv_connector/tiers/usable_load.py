"""Which blocks are loaded where blocks have window blocks: as many as end in a window that is whole. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.engine.blocks.pool import BlockPool


def usable_load(
    pool: BlockPool,
    is_whole_below: Callable[[bytes], bool],
    hashes: Sequence[bytes],
    known: Sequence[int],
    num_below: int,
    num_usable: int,
) -> tuple[int, list[bytes]]:
    """(first, the hashes from there on that are to be loaded): `known` are the pool's blocks of the first of `hashes`,
    of which `num_usable` can be begun from as they are, `num_below` more are in the tiers. Of blocks that the pool
    knows, those are loaded again whose window blocks it has lost. [] if nothing is gained."""

    def is_whole(index: int) -> bool:
        return index < len(known) and pool.windows.is_whole(known[index])

    end = len(known) + num_below
    while end > num_usable:
        in_window = range(min(pool.window.num_passed(end * pool.window.block_size), end), end)
        first = next((i for i in in_window if not is_whole(i)), len(known))
        first = min(first, len(known))
        lacks = next((i for i in reversed(in_window) if i >= first and not is_whole_below(hashes[i])), None)
        if lacks is None:
            return first, list(hashes[first:end])
        end = lacks
    return len(known), []
