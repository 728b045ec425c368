"""Hashes of cached blocks, each below that of the block before it: a hash leaves with all that descend from it."""

from __future__ import annotations

from collections.abc import Iterable


class PrefixTree:
    """The tree of cached hashes, part of BlockPool. `parent_of` maps every hash to its parent; None: a first block."""

    def __init__(self) -> None:
        self.parent_of: dict[bytes, bytes | None] = {}
        self._children_of: dict[bytes, dict[bytes, None]] = {}

    def add(self, block_hash: bytes, parent: bytes | None) -> bool:
        """Adds a hash below its parent. Returns False, and changes nothing, when the parent is not in the tree."""
        if parent is not None:
            if parent not in self.parent_of:
                return False
            self._children_of.setdefault(parent, {})[block_hash] = None
        self.parent_of[block_hash] = parent
        return True

    def children(self, block_hash: bytes) -> Iterable[bytes]:
        return self._children_of.get(block_hash, ())

    def remove(self, block_hash: bytes) -> list[bytes]:
        """Removes a hash and all that descend from it; returns them, children first."""
        doomed = [block_hash]
        for ancestor in doomed:
            doomed += self._children_of.pop(ancestor, ())
        for gone in doomed:
            parent = self.parent_of.pop(gone)
            if parent in self._children_of:
                del self._children_of[parent][gone]
                if not self._children_of[parent]:
                    del self._children_of[parent]
        doomed.reverse()
        return doomed

    def check_integrity(self) -> None:
        for block_hash, parent in self.parent_of.items():
            if parent is not None:
                assert parent in self.parent_of, "a cached block has lost its parent"
                assert block_hash in self._children_of[parent]
        assert sum(map(len, self._children_of.values())) == sum(p is not None for p in self.parent_of.values())
