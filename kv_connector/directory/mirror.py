"""A router's bounded copy of the directory. Pure: batches and snapshots in, longest prefixes out.

An entry (one hash of one owner) takes about 100 bytes: the 16-byte hash object, and its place in a dict that maps it
to a mask of tiers. When `max_entries` is reached, the owner that helped no lookup for longest is forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.kv_connector.directory.records import TIERS, Batch, Owner, TierChange, split_hashes

_TIER_BIT = {tier: 1 << index for index, tier in enumerate(TIERS)}


class Outcome(enum.Enum):
    APPLIED = "applied"
    IGNORED = "ignored"  # an old sequence or an old epoch
    GAP = "gap"  # something before it was missed: take a snapshot of that owner


@dataclass(slots=True)
class _OwnerView:
    sequence: int = 0
    whole: bool = False  # False: what is here may be out of date until the next snapshot or reset
    last_used: int = 0
    tiers_of: dict[bytes, int] = field(default_factory=dict)  # hash -> mask of tiers


class Mirror:
    """What every node holds. Owners are (node_id, epoch); only the adopted epoch of a node is kept."""

    def __init__(self, max_entries: int = 4_000_000) -> None:
        assert max_entries > 0
        self.max_entries = max_entries
        self.num_entries = 0
        self.num_gaps = 0
        self.num_forgotten_owners = 0
        self._owners: dict[Owner, _OwnerView] = {}
        self._epochs: dict[str, int] = {}
        self._clock = 0

    # --- life of owners -----------------------------------------------------------------------------------------

    def adopt(self, owner: Owner) -> None:
        """`owner` holds its node's lease: entries of other epochs of that node die."""
        node_id, epoch = owner
        if self._epochs.get(node_id) == epoch:
            return
        self.drop(node_id)
        self._epochs[node_id] = epoch
        self._owners[owner] = _OwnerView()

    def drop(self, node_id: str) -> None:
        """The node is gone; forget it."""
        epoch = self._epochs.pop(node_id, None)
        if epoch is not None:
            self.num_entries -= len(self._owners.pop((node_id, epoch)).tiers_of)

    def owners(self) -> list[Owner]:
        return list(self._owners)

    def distrust(self) -> None:
        """The stream was interrupted: every owner needs a snapshot; until then the old entries serve on."""
        for view in self._owners.values():
            view.whole = False

    def needs_snapshot(self) -> list[Owner]:
        return [owner for owner, view in self._owners.items() if not view.whole]

    def await_reset(self, owner: Owner) -> None:
        """Redis has no snapshot of the owner. Its next batch is a reset, or follows what is here, or is a gap."""
        self._owners[owner].whole = True

    # --- content ------------------------------------------------------------------------------------------------

    def apply(self, batch: Batch) -> Outcome:
        """Takes one batch of the stream in. After GAP `needs_snapshot` lists the owner, unless its node is unknown."""
        view = self._owners.get(batch.owner)
        if view is None:
            return Outcome.IGNORED if batch.node_id in self._epochs else Outcome.GAP
        if batch.sequence <= view.sequence:
            return Outcome.IGNORED
        if batch.reset:
            self._clear(view)
            view.whole = True
        elif not view.whole or batch.sequence != view.sequence + 1:
            self.num_gaps += view.whole
            view.whole = False
            return Outcome.GAP
        view.sequence = batch.sequence
        for change in batch.changes:
            self._change(view, change)
        self._stay_bounded(keep=view)
        return Outcome.APPLIED

    def load(self, owner: Owner, sequence: int, hashes_by_tier: Mapping[str, Iterable[bytes]]) -> None:
        """Takes a snapshot in. `sequence` was read before the hashes; later batches are applied on top of it."""
        view = self._owners.get(owner)
        if view is None or (view.whole and view.sequence > sequence):
            return
        self._clear(view)
        view.sequence, view.whole = sequence, True
        for tier, hashes in hashes_by_tier.items():
            self._store(view, hashes, _TIER_BIT[tier])
        self._stay_bounded(keep=view)

    def longest_prefix(self, block_hashes: Sequence[bytes]) -> dict[Owner, int]:
        """Owner -> number of leading hashes it holds in any tier; owners with none are left out."""
        self._clock += 1
        found: dict[Owner, int] = {}
        for owner, view in self._owners.items():
            length = prefix_length(view.tiers_of, block_hashes)
            if length:
                found[owner] = length
                view.last_used = self._clock
        return found

    def _change(self, view: _OwnerView, change: TierChange) -> None:
        bit = _TIER_BIT.get(change.tier, 0)  # a tier of a newer version: not ours to place by
        for block_hash in split_hashes(change.removed):
            tiers = view.tiers_of.get(block_hash, 0)
            if tiers & ~bit:
                view.tiers_of[block_hash] = tiers & ~bit
            elif tiers:
                del view.tiers_of[block_hash]
                self.num_entries -= 1
        if bit:
            self._store(view, split_hashes(change.stored), bit)

    def _store(self, view: _OwnerView, hashes: Iterable[bytes], bit: int) -> None:
        """Beyond the bound an owner's further hashes are left out: parents come first, so what stays is prefixes."""
        tiers_of = view.tiers_of
        for block_hash in hashes:
            tiers = tiers_of.get(block_hash, 0)
            if tiers or len(tiers_of) < self.max_entries:
                self.num_entries += not tiers
                tiers_of[block_hash] = tiers | bit

    def _clear(self, view: _OwnerView) -> None:
        self.num_entries -= len(view.tiers_of)
        view.tiers_of = {}

    def _stay_bounded(self, keep: _OwnerView) -> None:
        while self.num_entries > self.max_entries:
            others = [view for view in self._owners.values() if view is not keep and view.tiers_of]
            self._clear(min(others, key=lambda view: view.last_used))
            self.num_forgotten_owners += 1

    def check_integrity(self) -> None:
        assert self.num_entries == sum(len(view.tiers_of) for view in self._owners.values())
        assert self.num_entries <= self.max_entries
        assert {(node_id, epoch) for node_id, epoch in self._epochs.items()} == set(self._owners)
        assert all(all(view.tiers_of.values()) for view in self._owners.values()), "an entry is in some tier"


def prefix_length(held: Mapping[bytes, object], block_hashes: Sequence[bytes]) -> int:
    """How many leading hashes are held.

    Bisects, then verifies: an owner's set is nearly always prefix-closed (children are evicted first), but a mirror
    at its bound, or a tier that lost a parent, is not. The answer is exact either way.
    """
    low, high = 0, len(block_hashes)
    while low < high:
        middle = (low + high) // 2
        if block_hashes[middle] in held:
            low = middle + 1
        else:
            high = middle
    if all(map(held.__contains__, block_hashes[:low])):
        return low
    return next(index for index in range(low) if block_hashes[index] not in held)
