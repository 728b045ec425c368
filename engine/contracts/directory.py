"""What a node tells the block directory and a router asks it. Implemented in `kv_connector/directory`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tandem.engine.contracts.keys import NodeKey

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """A cached block appeared on (stored) or left (removed) this node. Parents stored first, children removed first."""

    block_hash: bytes
    stored: bool
    tier: str = "gpu"
    was_whole: bool = False  # it left the pool with its window blocks


class DirectoryReader(Protocol):
    """Router side: longest cached prefix per node, answered from memory."""

    def longest_prefix(self, block_hashes: Sequence[bytes]) -> dict[NodeKey, int]:
        """For each node the number of leading hash blocks that node holds; nodes with 0 are left out."""
