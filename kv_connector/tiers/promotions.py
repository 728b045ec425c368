"""The record of a request's blocks on their way up from a lower tier, and of what is held meanwhile. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from tandem.engine.blocks.reservations import Hold


class PromotionStage(enum.Enum):
    """How far a promotion has come."""

    FETCHING = "fetching"  # disk to host
    FETCHED = "fetched"  # pinned in the host pool; device blocks are yet to be allocated
    LOADING = "loading"  # host to device
    LOADED = "loaded"  # found by hash, held until the request starts
    OVER = "over"  # holds nothing; the request computes what it does not find


IN_FLIGHT = (PromotionStage.FETCHING, PromotionStage.LOADING)


@dataclass(eq=False, slots=True)
class Promotion:
    """One promotion. `hits` are the blocks of the pool that come before `hashes`. It has a reference to each of `hits`
    and `block_ids`."""

    number: int
    hits: list[int]
    parent: bytes | None  # hash of the last of `hits`
    hashes: list[bytes]
    stage: PromotionStage
    num_bare: int = 0  # the first of `hashes` that are loaded without window blocks: nothing reads those
    from_disk: frozenset[bytes] = frozenset()
    block_ids: list[int] = field(default_factory=list)
    hold: Hold | None = None
    is_wanted: bool = True  # False: let go of everything as soon as no copy is under way

    @property
    def held(self) -> list[int]:
        return [*self.hits, *self.block_ids]
