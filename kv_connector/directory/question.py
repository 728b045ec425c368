"""What a node asks the directory about its peers' blocks, and what follows from the answer. Pure; docs/kept_once.md.

Where blocks have window blocks, what a request finds on a node ends where the blocks of its last window are whole, with
theirs. So where a peer's copy of a block is to stand for one here, the peer is asked for the blocks before it, too,
that a row behind it sees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.engine.blocks.pool import BlockPool


@dataclass(frozen=True)
class Question:
    """`hashes`: the blocks in question. A row behind one sees `num_before` of the blocks up to that one through window
    blocks, or all where there are fewer. `parent_of`: each of those -> the block before it; None: the first."""

    hashes: tuple[bytes, ...] = ()
    num_before: int = 0  # 0: blocks have no window blocks
    parent_of: Mapping[bytes, bytes | None] = field(default_factory=dict)

    def ends(self, held: Collection[bytes], whole: Collection[bytes]) -> set[bytes]:
        """The blocks in question behind which a node has all that a row sees, which holds these and has those whole."""
        known = {each for each in self.hashes if each in held}
        num_whole: dict[bytes, int] = {}  # that follow on each other, up to each block
        for block_hash in self.parent_of:
            chain: list[bytes] = []
            at: bytes | None = block_hash
            while at is not None and at in whole and at in self.parent_of and at not in num_whole:
                chain.append(at)
                at = self.parent_of[at]
            num_before = self.num_before if at is None else num_whole.get(at, 0)
            num_whole |= {each: num_before + i for i, each in enumerate(reversed(chain), 1)}
        return {each for each in known if num_whole.get(each, 0) >= self.num_before}


def question_about(pool: BlockPool, hashes: Sequence[bytes]) -> Question:
    """The question about these cached blocks."""
    num_before = pool.window.num_before if pool.windows.num_each else 0
    parent_of: dict[bytes, bytes | None] = {}
    num_seen: dict[bytes, int] = {}  # how many up to each block were looked at
    for block_hash in _parents_first(pool, hashes) if num_before else ():  # so that each looks at few more
        at: bytes | None = block_hash
        for num_left in range(num_before, 0, -1):
            if at is None or num_seen.get(at, 0) >= num_left:
                break
            num_seen[at], parent_of[at] = num_left, pool.parent(at)
            at = parent_of[at]
    return Question(tuple(hashes), num_before, parent_of)


def _parents_first(pool: BlockPool, hashes: Sequence[bytes]) -> list[bytes]:
    left, order = set(hashes), list[bytes]()
    for block_hash in hashes:
        chain: list[bytes] = []
        at: bytes | None = block_hash
        while at in left:
            left.remove(at)
            chain.append(at)
            at = pool.parent(at)
        order += reversed(chain)
    return order


def is_whole_in(pool: BlockPool, block_hash: bytes) -> bool:
    """Whether the pool has a block with its window blocks, if blocks have any."""
    block_id = pool.find(block_hash)
    return block_id is not None and pool.windows.is_whole(block_id)
