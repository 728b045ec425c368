"""Which rows of a decode batch share their leading blocks, and which of those to read once.

Pure: from block tables to the numbers that decode kernels read (shared_prefix.SharedPrefixes). A group's rows are cut
into chunks of up to M rows, since one program multiplies the queries of a whole chunk with each key.

Shapes: S slots of a block table, B its columns, N rows of a batch, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

PREFIX_ROWS = 64  # query rows of a chunk; a guess
LARGEST_TILE = 64  # tokens; prefixes end where tiles of every size do
MAX_CHUNKS = 64  # a guess
# Tuned on an H200 with 32 query and 8 KV heads of 128 (benchmarks/decode_attention.py): what must be saved, in bytes of
# a layer's keys and values, for one more launch a layer and for a row whose part is merged. Rows that read a prefix
# each for itself find much of it in L2, so that short prefixes of many rows pay last.
BYTES_FOR_LAUNCHES = 40_000_000  # docs/measurements.md#decode-attention
BYTES_FOR_ROW = 1_500_000  # docs/measurements.md#decode-attention


@dataclass(frozen=True, eq=False)
class PrefixGroup:
    """Rows whose first `num_blocks` blocks are the same."""

    rows: np.ndarray  # intp [2 or more], indices into the batch
    num_blocks: int


def chunk_members(group_size: int) -> int:
    """M: rows of a chunk for layers with `group_size` query heads a KV head; below 2 nothing can be shared."""
    return PREFIX_ROWS // group_size


@dataclass(frozen=True)
class SharingCosts:
    """What reading a prefix once is worth: `members` as from chunk_members, `token_bytes` of a token's keys and values
    of one layer here."""

    members: int
    token_bytes: int

    def saved_bytes(self, num_rows: int, num_tokens: int) -> int:
        """The bytes that a group of rows over a prefix of so many tokens saves a layer; 0 or less where it doesn't
        pay."""
        reads = num_rows - -(-num_rows // self.members)
        return reads * num_tokens * self.token_bytes - num_rows * BYTES_FOR_ROW

    def saved_by(self, groups: Sequence[PrefixGroup], block_size: int) -> int:
        """The bytes that all of these groups save a layer."""
        return sum(self.saved_bytes(len(group.rows), group.num_blocks * block_size) for group in groups)

    def is_worthwhile(self, saved_bytes: int) -> bool:
        """Whether all groups of a batch together pay for their launches."""
        return self.members > 1 and saved_bytes > BYTES_FOR_LAUNCHES


def choose_groups(
    tables_SB: np.ndarray, slot_N: np.ndarray, whole_N: np.ndarray, block_size: int, costs: SharingCosts
) -> list[PrefixGroup]:
    """The groups that save most, those that save more first; none if all together are not worth a launch.

    Row i has table `tables_SB[slot_N[i]]`, of whose blocks it may share the first `whole_N[i]`: full ones, and not all
    of its tokens. Rows are in one group at most.
    """
    rows = _rows_with_company(tables_SB, slot_N, whole_N)
    if len(rows) < 2:
        return []
    order, agreed = _sort_by_table(tables_SB[slot_N[rows], : int(whole_N[rows].max())], whole_N[rows])
    step = lcm(block_size, LARGEST_TILE) // block_size
    runs = _best_runs((agreed // step * step).tolist(), block_size, costs)
    if not costs.is_worthwhile(sum(run.saved for run in runs)):
        return []
    runs.sort(key=lambda run: -run.saved)
    return [PrefixGroup(np.sort(rows[order[run.first : run.last]]), run.num_blocks) for run in runs]


def _rows_with_company(tables_SB: np.ndarray, slot_N: np.ndarray, whole_N: np.ndarray) -> np.ndarray:
    """Rows whose first block some other row has too: in most batches none, which this finds out cheaply."""
    rows = np.flatnonzero(whole_N)
    first = tables_SB[slot_N[rows], 0]
    order = np.argsort(first)
    same = np.zeros(len(rows) + 1, np.bool_)
    ordered = first[order]
    same[1:-1] = ordered[1:] == ordered[:-1]
    return rows[order[same[1:] | same[:-1]]]


def _sort_by_table(tables_RB: np.ndarray, whole_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(the rows in lexicographic order of their whole blocks, how many blocks each agrees on with the one before it).

    In this order rows with a common beginning lie side by side, shorter ones first.
    """
    inside = np.arange(tables_RB.shape[1]) < whole_R[:, None]
    keys = np.where(inside, tables_RB + 1, 0).astype(">i4")
    content, width = keys.tobytes(), 4 * keys.shape[1]  # as bytes objects: numpy compares long strings slowly
    parts = [content[at : at + width] for at in range(0, len(content), width)]
    order = np.array(sorted(range(len(parts)), key=parts.__getitem__))
    ordered = keys[order]
    differ = np.ones((len(order) - 1, keys.shape[1] + 1), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=differ[:, :-1])
    agreed = np.zeros(len(order), np.int64)
    agreed[1:] = np.minimum(differ.argmax(1), np.minimum(whole_R[order[1:]], whole_R[order[:-1]]))
    return order, agreed


@dataclass(slots=True)
class _Run:
    """Neighbours [first, last) that agree on `num_blocks` blocks, read once."""

    first: int
    last: int
    num_blocks: int
    saved: int


@dataclass(slots=True)
class _Node:
    """Neighbours from `first` on that agree on `num_blocks` blocks, and the best choice among those further down."""

    first: int
    num_blocks: int
    saved: int
    runs: list[_Run]


def _best_runs(agreed: list[int], block_size: int, costs: SharingCosts) -> list[_Run]:
    """The disjoint runs that save most. A node of the tree of beginnings is either one run or its children's best.

    One pass over the tree as the depths between neighbours describe it, open nodes on a stack.
    """
    stack = [_Node(0, 0, 0, [])]
    for index in range(1, len(agreed) + 1):
        depth = agreed[index] if index < len(agreed) else 0
        closed = _Node(index - 1, 0, 0, [])
        while stack[-1].num_blocks > depth:
            top = stack.pop()
            top.saved += closed.saved
            top.runs += closed.runs
            own = costs.saved_bytes(index - top.first, top.num_blocks * block_size)
            if own > 0 and own >= top.saved:
                top.saved, top.runs = own, [_Run(top.first, index, top.num_blocks, own)]
            closed = top
        if stack[-1].num_blocks < depth:
            stack.append(_Node(closed.first, depth, 0, []))
        stack[-1].saved += closed.saved
        stack[-1].runs += closed.runs
    return stack[0].runs


@dataclass(frozen=True, eq=False)
class PrefixLayout:
    """Where the numbers of SharedPrefixes lie in one int32 array: C chunk lengths, C x M rows, N lengths, N places."""

    chunks: int
    members: int
    rows: int

    @property
    def num_words(self) -> int:
        return self.chunks * (1 + self.members) + 2 * self.rows

    @classmethod
    def for_rows(cls, rows: int, members: int) -> PrefixLayout:
        return cls(max_chunks(rows), members, rows)

    def pack(self, groups: Sequence[PrefixGroup], block_size: int) -> np.ndarray:
        """int32 [num_words]. Groups beyond the last chunk are left out, whole: their rows read for themselves."""
        words = np.zeros(self.num_words, np.int32)
        lengths, chunk_rows, row_lens, row_places = self.split(words)
        chunk_rows[:] = -1
        sizes = np.array([len(group.rows) for group in groups], np.int64)
        counts = -(-sizes // self.members)
        kept = int(np.searchsorted(np.cumsum(counts), self.chunks, side="right"))
        if kept == 0:
            return words
        sizes, counts = sizes[:kept], counts[:kept]
        tokens = np.array([group.num_blocks * block_size for group in groups[:kept]])
        rows = np.concatenate([group.rows for group in groups[:kept]])
        index = np.arange(len(rows)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        each = np.repeat(-(-sizes // counts), sizes)
        chunk, member = np.repeat(np.cumsum(counts) - counts, sizes) + index // each, index % each
        lengths[: counts.sum()] = np.repeat(tokens, counts)
        chunk_rows[chunk, member] = rows
        row_lens[rows] = np.repeat(tokens, sizes)
        row_places[rows] = chunk * self.members + member
        return words

    def split(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Views: chunk lengths [C], chunk rows [C, M], row lengths [N], row places [N]. Takes tensors as well."""
        first = self.chunks * (1 + self.members)
        rows = words[self.chunks : first].reshape(self.chunks, self.members)
        return words[: self.chunks], rows, words[first : first + self.rows], words[first + self.rows :]


def max_chunks(rows: int) -> int:
    """How many chunks there can be: at worst three rows make two, where M is 2."""
    return max(1, min(MAX_CHUNKS, 2 * rows // 3))
