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
SEGMENT_WORDS = 1 << 13  # words that share one table of multipliers; each segment mixes in its own key

_multipliers: dict[torch.device, torch.Tensor] = {}


def block_digests(
    pool: torch.Tensor,
    block_ids: Sequence[int] | torch.Tensor,
    key: int,
    num_valid_last: int,
    block_size: int,
    *,
    positions: Sequence[int] | None = None,
    on_host: bool = False,
) -> torch.Tensor:
    """Digests of `block_ids` in `pool` [num_blocks, heads, layers, 2, block_size, head_dim], over all heads and layers.

    `key`: any u64, equal on both sides, new for each (request, attempt). Of the last block of the list only the first
    `num_valid_last` token slots count. `positions[i]` is what block i mixes in as its place in the whole list (default
    0, 1, …), for digests of a part of it. Returns int64 [n] on the pool's device; nothing waits for the device, unless
    they are wanted `on_host`: one copy is waited for then, and the last step, taken there, costs no launches. Raises
    ValueError for an impossible `num_valid_last`.
    """
    if not 1 <= num_valid_last <= block_size or pool.shape[-2] != block_size:
        raise ValueError(f"num_valid_last {num_valid_last} of block_size {block_size}, the pool has {pool.shape[-2]}")
    ids = torch.as_tensor(block_ids, dtype=torch.long, device=pool.device).reshape(-1)
    places = list(range(len(ids))) if positions is None else list(positions)
    if len(places) != len(ids):
        raise ValueError(f"{len(places)} positions for {len(ids)} blocks")
    if len(ids) == 0:
        return torch.empty(0, dtype=torch.int64, device=pool.device)
    num_whole = len(ids) if num_valid_last == block_size else len(ids) - 1
    sum_blocks = _sums_in_place if pool.device.type == "cpu" else _sums_on_gpu
    sums = [sum_blocks(pool, ids[:num_whole], key)] if num_whole else []
    if num_whole < len(ids):
        sums.append(sum_blocks(pool[..., :num_valid_last, :], ids[num_whole:], key))
    both = torch.cat(sums)
    return _finish(both.cpu() if on_host else both, places, key, num_whole, num_valid_last)


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
        """Nothing summed yet, for blocks of `pool` on its device."""
        num_words = -(-pool[0].numel() * pool.element_size() // 8)
        sums = torch.zeros(num_blocks, dtype=torch.int64, device=pool.device)
        return cls(key, sums, _segment_keys(key, num_words, pool.device), _multiplier_table(pool.device))

    def add_layers(self, pool_NHLPBD: torch.Tensor, listed_4N: torch.Tensor, layers: range | None) -> None:
        """What something else moves: `layers` (None: all) of whole blocks of a pool that `why_not_words` has nothing
        against, listed as for `move_blocks`. On CUDA on the current stream."""
        raw = pool_NHLPBD.view(torch.uint8) if pool_NHLPBD.element_size() == 1 else pool_NHLPBD
        words_NHLW = raw.flatten(3).view(torch.int64)
        chosen = layers or range(pool_NHLPBD.shape[2])
        if pool_NHLPBD.is_cuda:
            from tandem.kernels.triton_kernels.digest import add_layer_sums

            add_layer_sums(words_NHLW, listed_4N, chosen, self.keys_S2, self.table, self.sums_N)
            return
        _, heads, num_layers, layer_words = words_NHLW.shape
        at_HL = torch.arange(heads)[:, None] * num_layers + torch.arange(chosen.start, chosen.stop)
        at_HLW = at_HL[..., None] * layer_words + torch.arange(layer_words)
        keys_HLW2 = self.keys_S2[at_HLW // SEGMENT_WORDS]
        first, second = ((self.table[i][at_HLW % SEGMENT_WORDS] ^ keys_HLW2[..., i]) | 1 for i in (0, 1))
        for block, index in zip(listed_4N[0].tolist(), listed_4N[3].tolist(), strict=True):
            words = words_NHLW[block, :, chosen.start : chosen.stop]
            self.sums_N[index] += (words * first + (words >> 32) * second).sum()

    def on_host(self) -> BlockSums:
        """Waits for what the current stream has enqueued."""
        return replace(self, sums_N=self.sums_N.cpu())

    def digests(self, num_valid_last: int, block_size: int, *, positions: Sequence[int] | None = None) -> torch.Tensor:
        """What `block_digests` gives for these blocks: int64 [N]."""
        places = list(range(len(self.sums_N))) if positions is None else list(positions)
        num_whole = len(places) if num_valid_last == block_size else len(places) - 1
        return _finish(self.sums_N, places, self.key, num_whole, num_valid_last)


def _sums_in_place(pool: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    """int64 [n] multilinear sums on CPU: one block at a time where it lies, through a buffer that stays in cache."""
    blocks = [_as_words(pool[block].reshape(1, -1))[0] for block in ids.tolist()]
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


def _sums_on_gpu(pool: torch.Tensor, ids: torch.Tensor, key: int) -> torch.Tensor:
    """int64 [n] multilinear sums, in place where blocks are whole runs of words, else of a packed copy."""
    from tandem.kernels.triton_kernels.digest import block_sums

    block_bytes = pool[0].numel() * pool.element_size()
    stride_bytes = pool.stride(0) * pool.element_size()
    if pool[0].is_contiguous() and block_bytes % 8 == 0 and stride_bytes % 8 == 0:
        raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        words = raw.flatten(1).view(torch.int64)
    else:
        raw = pool.view(torch.uint8) if pool.element_size() == 1 else pool
        words = _as_words(raw.index_select(0, ids).reshape(len(ids), -1))
        ids = torch.arange(len(ids), device=pool.device)
    keys_S2 = _segment_keys(key, words.shape[1], pool.device)
    return block_sums(words, ids, keys_S2, _multiplier_table(pool.device), words.shape[1])


def _segment_keys(key: int, num_words: int, device: torch.device) -> torch.Tensor:
    """int64 [segments, 2]: what the multipliers of each segment of a block are XORed with."""
    num_segments = -(-num_words // SEGMENT_WORDS)
    keys = _mixed(key, np.arange(2 * num_segments)).reshape(num_segments, 2)
    return torch.from_numpy(keys).to(device, non_blocking=True)


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
