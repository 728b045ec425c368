"""64-bit digests of KV blocks: what the source of a hand-off sends and the sink checks before it commits.

A multilinear hash (as in Lemire and Kaser, "Strongly universal string hashing is fast"): the sum over all 64-bit words
w of w * a + (w >> 32) * b modulo 2^64, with pseudo-random odd multipliers from (key, word position), then a mixing step
with key and list position. Any changed word changes the sum; two changed words cancel with a chance near 2^-32 (the
second term keeps flips of top bits, which only survive in the top bit of the first, from cancelling in pairs). It
guards against corruption and mix-ups, not against a peer that holds the cluster key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_SPREADING = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SEGMENT_WORDS = 1 << 13  # words that share one table of multipliers; each segment mixes in its own key; a guess

_multipliers: dict[torch.device, torch.Tensor] = {}


def block_digests(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    key: int,
    num_valid_last: int,
    block_size: int,
    *,
    positions: Sequence[int] | None = None,
    num_last: int = 1,
) -> torch.Tensor:
    """Digests of `block_ids` in `pool` [num_blocks, heads, layers, planes, block_size, head_dim], over all of each
    block.

    `key`: any u64, equal on both sides, new for each (request, attempt). Of the last `num_last` blocks of the list only
    the first `num_valid_last` token slots count. `positions[i]` is what block i mixes in as its place in the whole list
    (default 0, 1, …), for digests of a part of it. Returns int64 [n] on the pool's device; nothing waits for the
    device. Raises ValueError for an impossible `num_valid_last`. Callers that want the digests on the host soon use
    digest_pass.py.
    """
    if not 1 <= num_valid_last <= block_size or pool.shape[-2] != block_size:
        raise ValueError(f"num_valid_last {num_valid_last} of block_size {block_size}, the pool has {pool.shape[-2]}")
    ids = block_ids.tolist() if isinstance(block_ids, torch.Tensor) else list(block_ids)
    places = list(range(len(ids))) if positions is None else list(positions)
    if len(places) != len(ids):
        raise ValueError(f"{len(places)} positions for {len(ids)} blocks")
    if not ids:
        return torch.empty(0, dtype=torch.int64, device=pool.device)
    sums = multilinear_sums(pool, ids, key, valid_slots(len(ids), num_valid_last, block_size, num_last))
    return digests_of_sums(sums, key, num_valid_last, block_size, positions=places, num_last=num_last)


def valid_slots(num_blocks: int, num_valid_last: int, block_size: int, num_last: int = 1) -> list[int]:
    """The number of valid slots of each block of a list of which the last `num_last` alone may be partly filled."""
    return [block_size] * (num_blocks - num_last) + [num_valid_last] * min(num_last, num_blocks)


def last_of_piece(piece: range, num_blocks: int, num_last: int) -> int:
    """How many of the places `piece` in a list of `num_blocks` are among its last `num_last`."""
    return min(len(piece), max(0, piece.stop - num_blocks + num_last))


def sent_form(sums: np.ndarray, key: int, num_valid_last: int, block_size: int, num_last: int = 1) -> np.ndarray:
    """Digests as `digests_of_sums`, of sums on the host, as they are sent: little-endian int64 [n]."""
    digests = digests_of_sums(torch.from_numpy(sums), key, num_valid_last, block_size, num_last=num_last)
    return digests.numpy().astype("<i8")


def digests_of_sums(
    sums: torch.Tensor,
    key: int,
    num_valid_last: int,
    block_size: int,
    *,
    positions: Sequence[int] | None = None,
    num_last: int = 1,
) -> torch.Tensor:
    """What `block_digests` makes of its blocks' sums, int64 [n] on their device. Of the last `num_last` blocks
    `num_valid_last` slots count."""
    places = list(range(len(sums))) if positions is None else list(positions)
    num_whole = len(places) if num_valid_last == block_size else max(0, len(places) - num_last)
    return _finish(sums, places, key, num_whole, num_valid_last)


def multilinear_sums(pool: torch.Tensor, block_ids: Sequence[int], key: int, num_valid: Sequence[int]) -> torch.Tensor:
    """Multilinear sums of the first `num_valid[i]` slots of each block, int64 [n] on the pool's device."""
    runs = BlockRuns.of(pool) if pool.device.type != "cpu" else None
    if runs is not None:
        job = torch.from_numpy(runs.job(block_ids, key, num_valid)).to(pool.device, non_blocking=True)
        runs.enqueue(job, len(block_ids))
        return job[: len(block_ids)]
    sum_blocks = _sums_in_place if pool.device.type == "cpu" else _sums_of_packed
    sums = torch.empty(len(block_ids), dtype=torch.int64, device=pool.device)
    for valid in set(num_valid):
        alike = [index for index, each in enumerate(num_valid) if each == valid]
        sums[alike] = sum_blocks(pool[..., :valid, :], [block_ids[index] for index in alike], key)
    return sums


@dataclass(frozen=True)
class BlockRuns:
    """Blocks of a GPU pool as runs of 64-bit words, one for the slots of each plane: a kernel sums them in place."""

    words_NW: torch.Tensor  # int64
    run_words: int
    slot_words: int

    @classmethod
    def of(cls, pool_NHLPBD: torch.Tensor) -> BlockRuns | None:
        """The runs of a pool's blocks; None where its slots are no whole words in a row."""
        slot_bytes = pool_NHLPBD.shape[-1] * pool_NHLPBD.element_size()
        stride_bytes = pool_NHLPBD.stride(0) * pool_NHLPBD.element_size()
        if not pool_NHLPBD[0].is_contiguous() or slot_bytes % 8 or stride_bytes % 8:
            return None
        raw = pool_NHLPBD.view(torch.uint8) if pool_NHLPBD.element_size() == 1 else pool_NHLPBD
        words = raw.flatten(1).view(torch.int64)
        return cls(words, pool_NHLPBD.shape[-2] * slot_bytes // 8, slot_bytes // 8)

    def job(self, block_ids: Sequence[int], key: int, num_valid: Sequence[int]) -> np.ndarray:
        """What the kernel is told, int64 [3 n + 2 segments]: a sum of nothing, id and words of each run of each block,
        then the segments' keys."""
        taken = [valid * self.slot_words for valid in num_valid]
        nothing = np.zeros(len(taken), dtype=np.int64)
        return np.concatenate((nothing, block_ids, taken, segment_keys(key, self.words_NW.shape[1]).ravel()))

    def enqueue(self, job: torch.Tensor, num_blocks: int) -> None:
        """Enqueues the sums that `job`, on the device, asks for. Its leading `num_blocks` numbers become them."""
        from tandem.kernels.triton_kernels.blocks.digest import add_block_sums

        add_block_sums(self.words_NW, job, num_blocks, self.run_words, _multiplier_table(job.device))


@dataclass(frozen=True)
class BlockSums:
    """Sums of N blocks that a kernel takes up while it moves them, all at once or layer by layer (move_blocks.py).

    Of every block the same slots must be moved for each layer; `digests` are valid when each layer was moved once.
    On CUDA all belongs to one stream.
    """

    key: int
    sums_N: torch.Tensor  # int64, added to
    keys_S2: torch.Tensor  # int64: what each segment's multipliers are XORed with
    table: torch.Tensor  # int64 [2, SEGMENT_WORDS]

    @classmethod
    def of_none(cls, pool: torch.Tensor, num_blocks: int, key: int) -> BlockSums:
        """Sums of nothing yet, for blocks of `pool` on its device."""
        num_words = -(-pool[0].numel() * pool.element_size() // 8)
        sums = torch.zeros(num_blocks, dtype=torch.int64, device=pool.device)
        keys = torch.from_numpy(segment_keys(key, num_words)).to(pool.device, non_blocking=True)
        return cls(key, sums, keys, _multiplier_table(pool.device))

    def add_layers(self, pool_NHLPBD: torch.Tensor, listed_4N: torch.Tensor, layers: range | None) -> None:
        """Adds sums of what something else moves: `layers` (None: all) of whole blocks of a CUDA pool that
        `why_not_words` has nothing against, listed as for `move_blocks`. Enqueued on the current stream."""
        from tandem.kernels.triton_kernels.blocks.digest import add_layer_sums

        raw = pool_NHLPBD.view(torch.uint8) if pool_NHLPBD.element_size() == 1 else pool_NHLPBD
        words_NHLW = raw.flatten(3).view(torch.int64)
        every = range(pool_NHLPBD.shape[2])
        add_layer_sums(words_NHLW, listed_4N, layers or every, self.keys_S2, self.table, self.sums_N)

    def on_host(self) -> BlockSums:
        """Waits for what the current stream has enqueued."""
        return replace(self, sums_N=self.sums_N.cpu())

    def digests(self, num_valid_last: int, block_size: int, *, positions: Sequence[int] | None = None) -> torch.Tensor:
        """What `block_digests` gives for these blocks: int64 [N]."""
        return digests_of_sums(self.sums_N, self.key, num_valid_last, block_size, positions=positions)


def _sums_in_place(pool: torch.Tensor, ids: Sequence[int], key: int) -> torch.Tensor:
    """int64 [n] multilinear sums on CPU: one block at a time where it lies, through a buffer that stays in cache."""
    blocks = [_as_words(pool[block].reshape(1, -1))[0] for block in ids]
    num_words = blocks[0].shape[0]
    high = torch.empty(min(SEGMENT_WORDS, num_words), dtype=torch.int64)
    parts: list[torch.Tensor] = []
    for start in range(0, num_words, SEGMENT_WORDS):
        stop = min(start + SEGMENT_WORDS, num_words)
        first, second = _multipliers_of(pool.device, key, start // SEGMENT_WORDS, stop - start)
        for block in blocks:
            words = block[start:stop]
            torch.bitwise_right_shift(words, 32, out=high[: stop - start])
            parts.append(torch.dot(words, first).add_(torch.dot(high[: stop - start], second)))
    return torch.stack(parts).view(-1, len(blocks)).sum(0)


def _sums_of_packed(pool: torch.Tensor, ids: Sequence[int], key: int) -> torch.Tensor:
    """int64 [n] multilinear sums on a GPU, of a copy: what is summed of each block is no whole number of words, or does
    not begin at one."""
    raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
    rows = _as_words(raw.index_select(0, torch.tensor(ids, device=pool.device)).reshape(len(ids), -1))
    packed = BlockRuns(rows, rows.shape[1], rows.shape[1])
    job = torch.from_numpy(packed.job(range(len(ids)), key, [1] * len(ids))).to(pool.device, non_blocking=True)
    packed.enqueue(job, len(ids))
    return job[: len(ids)]


def segment_keys(key: int, num_words: int) -> np.ndarray:
    """int64 [segments, 2]: what the multipliers of each segment of a block are XORed with."""
    num_segments = -(-num_words // SEGMENT_WORDS)
    return _mixed(key, np.arange(2 * num_segments)).reshape(num_segments, 2)


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """rows [n, elements] of any dtype as int64 [n, words], padded with zeros to whole words."""
    raw = rows.contiguous().view(torch.uint8)
    padding = -raw.shape[1] % 8
    return (torch.nn.functional.pad(raw, (0, padding)) if padding else raw).view(torch.int64)


def _multipliers_of(device: torch.device, key: int, segment: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The two odd multipliers of each word of a segment, int64 [width]."""
    table = _multiplier_table(device)
    first, second = (table[i, :width] ^ _signed(_mix(key, 2 * segment + i)) for i in (0, 1))
    return first | 1, second | 1


def _finish(sums: torch.Tensor, places: list[int], key: int, num_whole: int, num_valid_last: int) -> torch.Tensor:
    """Mixes in key, place and number of valid slots, then spreads every bit over the word (xor-shift-multiply). Sums on
    the host by numpy: each operation of torch lets go of the interpreter and waits for it again."""
    valid = np.full(len(places), num_valid_last)
    valid[:num_whole] = 0
    salts = _mixed(key, (np.array(places) + 1) * 0x10001 + valid)
    if sums.device.type == "cpu":
        mixed = sums.numpy().view(np.uint64) ^ salts.view(np.uint64)
        for multiplier in _SPREADING:
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(multiplier)
        return torch.from_numpy((mixed ^ (mixed >> np.uint64(32))).view(np.int64))
    spread = sums ^ torch.from_numpy(salts).to(sums.device, non_blocking=True)
    for multiplier in _SPREADING:
        spread = (spread ^ ((spread >> 29) & ((1 << 35) - 1))) * _signed(multiplier)
    return spread ^ ((spread >> 32) & ((1 << 32) - 1))


def _multiplier_table(device: torch.device) -> torch.Tensor:
    """int64 [2, SEGMENT_WORDS] of splitmix64 outputs, the same in every process."""
    if device not in _multipliers:
        counter = torch.from_numpy(_mixed(0, np.arange(2 * SEGMENT_WORDS)))
        _multipliers[device] = counter.view(2, SEGMENT_WORDS).to(device)
    return _multipliers[device]


def _mixed(key: int, index: np.ndarray) -> np.ndarray:
    """`_mix` of each index of an integer array, as int64."""
    z = (index.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_SPREADING[0])
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SPREADING[1])
    return (z ^ (z >> np.uint64(31))).view(np.int64)


def _mix(key: int, index: int) -> int:
    """splitmix64 of (key, index), on the host."""
    z = (key + (index + 1) * _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _SPREADING[0]) & _MASK
    z = ((z ^ (z >> 27)) * _SPREADING[1]) & _MASK
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """A u64 as the int64 of the same bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
