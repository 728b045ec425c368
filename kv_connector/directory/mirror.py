"""A router's bounded copy of the directory. Pure: batches and snapshots in, longest prefixes out.

An entry is one hash of one owner; `holders` keeps it in less than 100 bytes. When `max_entries` is reached, the owner
that helped no lookup for longest is forgotten.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.engine.contracts.hashing import BLOCKS_PER_GROUP
from tandem.engine.contracts.keys import NodeKey
from tandem.kv_connector.directory.holders import Holders, key_of, keys_of, keys_of_joined
from tandem.kv_connector.directory.records import TIERS, Batch, TierChange

_TIER_INDEX = {tier: index for index, tier in enumerate(TIERS)}
SWEEP_BLOCKS = 1_024  # swept for dropped owners with each batch: a fraction of a millisecond; a guess


class Outcome(enum.Enum):
    """What became of a batch that was brought to a mirror."""

    APPLIED = "applied"
    IGNORED = "ignored"  # an old sequence or an old epoch
    GAP = "gap"  # something before it was missed: take a snapshot of that owner


@dataclass(slots=True)
class _OwnerView:
    column: int  # in Holders
    sequence: int = 0
    whole: bool = False  # False: the entries may be out of date until the next snapshot or reset
    last_used: int = 0
    num_entries: int = 0


class Mirror:
    """The blocks that every node holds. Only the adopted epoch of a node is kept."""

    def __init__(self, max_entries: int = 4_000_000) -> None:
        assert max_entries > 0
        self.max_entries = max_entries
        self.num_entries = 0
        self.num_gaps = 0
        self.num_forgotten_owners = 0
        self._owners: dict[NodeKey, _OwnerView] = {}
        self._owner_of: dict[int, NodeKey] = {}  # by column
        self._holders = Holders()
        self._epochs: dict[str, int] = {}
        self._clock = 0

    # --- life of owners -----------------------------------------------------------------------------------------

    def adopt(self, owner: NodeKey) -> None:
        """Takes `owner` for the living epoch of its node: entries of other epochs of that node are dropped."""
        node_id, epoch = owner
        if self._epochs.get(node_id) == epoch:
            return
        self.drop(node_id)
        self._epochs[node_id] = epoch
        view = self._owners[owner] = _OwnerView(self._holders.open_column())
        self._owner_of[view.column] = owner

    def drop(self, node_id: str) -> None:
        """Forgets a node that is gone."""
        epoch = self._epochs.pop(node_id, None)
        if epoch is not None:
            view = self._owners.pop(NodeKey(node_id, epoch))
            self.num_entries -= view.num_entries
            self._holders.close_column(view.column)
            del self._owner_of[view.column]

    def owners(self) -> list[NodeKey]:
        return list(self._owners)

    def distrust(self, owner: NodeKey | None = None) -> None:
        """Notes that something was missed: this owner, or every one (None), needs a snapshot. Until then the old
        entries serve on."""
        for view in self._owners.values() if owner is None else [self._owners[owner]]:
            view.whole = False

    def sequence(self, owner: NodeKey) -> int:
        """The sequence number of the newest batch of this owner that was applied."""
        return self._owners[owner].sequence

    def needs_snapshot(self) -> list[NodeKey]:
        return [owner for owner, view in self._owners.items() if not view.whole]

    def await_reset(self, owner: NodeKey) -> None:
        """Notes that Redis has no snapshot of the owner. Its next batch is a reset, or follows the last one applied, or
        shows a gap."""
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
        self._holders.sweep(SWEEP_BLOCKS)
        return Outcome.APPLIED

    def load(self, owner: NodeKey, sequence: int, hashes_by_tier: Mapping[str, Iterable[bytes]]) -> None:
        """Takes a snapshot in. `sequence` was read before the hashes; later batches are applied on top of it."""
        view = self._owners.get(owner)
        if view is None or (view.whole and view.sequence > sequence):
            return
        self._clear(view)
        view.sequence, view.whole = sequence, True
        for tier, hashes in hashes_by_tier.items():
            self._store(view, _TIER_INDEX[tier], keys_of(list(hashes)))
        self._stay_bounded(keep=view)

    def longest_prefix(self, block_hashes: Sequence[bytes]) -> dict[NodeKey, int]:
        """For each owner, the number of leading hashes that it holds in any tier; owners with none are left out.

        Nodes hold no block without those before it, so the ends of groups tell how many groups an owner holds, and
        only the group in which its prefix ends is looked at block by block. `block_hashes` may compute hashes when they
        are asked for: few more are asked for than some owner holds.
        """
        if not block_hashes or (first := key_of(block_hashes[0])) not in self._holders:
            return {}
        self._clock += 1
        num_groups = self._groups_held(first, block_hashes)
        found: dict[NodeKey, int] = {}
        for groups in set(num_groups.values()):
            start = groups * BLOCKS_PER_GROUP
            rest = self._holders.prefixes(map(key_of, block_hashes[start : start + BLOCKS_PER_GROUP - 1]))
            for column, held in num_groups.items():
                if held == groups:
                    owner = self._owner_of[column]
                    found[owner] = start + rest.get(column, 0)
                    self._owners[owner].last_used = self._clock
        return found

    def _groups_held(self, first: int, block_hashes: Sequence[bytes]) -> dict[int, int]:
        """The number of leading groups that each column holds, for columns that hold the first block, whose key is
        `first`."""
        columns = self._holders.prefixes((first,))
        ends = range(BLOCKS_PER_GROUP - 1, len(block_hashes), BLOCKS_PER_GROUP)
        whole = self._holders.prefixes(map(key_of, map(block_hashes.__getitem__, ends)))
        return {column: whole.get(column, 0) for column in columns}

    def _change(self, view: _OwnerView, change: TierChange) -> None:
        tier = _TIER_INDEX.get(change.tier)
        if tier is None:  # what nodes tell each other, or from a newer version: routers don't place by it
            return
        num_gone = self._holders.remove(view.column, tier, keys_of_joined(change.removed))
        view.num_entries -= num_gone
        self.num_entries -= num_gone
        self._store(view, tier, keys_of_joined(change.stored))

    def _store(self, view: _OwnerView, tier: int, keys: Iterable[int]) -> None:
        """Stores an owner's hashes, and leaves out those beyond the bound: parents come first, so that prefixes
        stay."""
        num_new = self._holders.add(view.column, tier, keys, self.max_entries - view.num_entries)
        view.num_entries += num_new
        self.num_entries += num_new

    def _clear(self, view: _OwnerView) -> None:
        if not view.num_entries:
            return
        owner = self._owner_of.pop(view.column)
        self._holders.close_column(view.column)
        view.column = self._holders.open_column()
        self._owner_of[view.column] = owner
        self.num_entries -= view.num_entries
        view.num_entries = 0

    def _stay_bounded(self, keep: _OwnerView) -> None:
        while self.num_entries > self.max_entries:
            others = [view for view in self._owners.values() if view is not keep and view.num_entries]
            self._clear(min(others, key=lambda view: view.last_used))
            self.num_forgotten_owners += 1

    def check_integrity(self) -> None:
        self._holders.check_integrity()
        assert self.num_entries == sum(view.num_entries for view in self._owners.values())
        assert self.num_entries <= self.max_entries
        assert {NodeKey(node_id, epoch) for node_id, epoch in self._epochs.items()} == set(self._owners)
        for owner, view in self._owners.items():
            assert self._owner_of[view.column] == owner
            assert self._holders.count(view.column) == view.num_entries
        assert len(self._owner_of) == len(self._owners)
