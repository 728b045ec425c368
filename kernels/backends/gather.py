"""Moving KV between the paged cache and plain tensors, and the padded groups that decode rows are gathered in."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tandem.kernels.api.backend import PagedKV
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.dense import mask_of
from tandem.kernels.blocks.quantization import FP8_DTYPE, Scale, as_bytes, dequantize, quantize

GROUP_TOKENS = 1 << 14  # padded tokens of decode rows gathered at once: more only costs memory traffic; a guess


def write_to_cache(key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor) -> None:
    """Stores key/value [T, K, D] at slots [T]; negative slots are skipped (finding them waits for the device)."""
    slots = slot_mapping.reshape(-1).long()
    keep = slots >= 0
    if not bool(keep.all()):
        slots, key, value = slots[keep], key[keep], value[keep]
    if slots.numel() == 0:
        return
    blocks, offsets = slots // kv.block_size, slots % kv.block_size
    for source, cache, scale in ((key, kv.key_cache, kv.k_scale), (value, kv.value_cache, kv.v_scale)):
        stored = quantize(source, scale) if kv.is_fp8 else source.to(cache.dtype)
        as_bytes(cache)[blocks, :, offsets] = as_bytes(stored)


def gather_blocks(cache: torch.Tensor, scale: Scale, block_ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """cache [num_blocks, K, S, D], block_ids int64 [N, B] -> [N, K, B * S, D] in `dtype`, dequantized."""
    num_blocks, num_heads, block_size, head_size = cache.shape
    heads = torch.arange(num_heads, device=cache.device)[None, :, None]
    run = block_size * head_size  # elements that lie together
    block_stride, head_stride = cache.stride(0), cache.stride(1)
    if cache[0, 0].is_contiguous() and block_stride % run == 0 and head_stride % run == 0:
        block_runs, head_runs = block_stride // run, head_stride // run
        num_runs = (num_blocks - 1) * block_runs + (num_heads - 1) * head_runs + 1
        runs = as_bytes(cache).as_strided((num_runs, run), (run, 1))
        index = block_ids[:, None, :] * block_runs + heads * head_runs
        gathered = runs.index_select(0, index.reshape(-1))
    else:
        gathered = as_bytes(cache)[block_ids[:, None, :], heads]
    tokens = gathered.view(cache.dtype).view(block_ids.shape[0], num_heads, -1, head_size)
    return dequantize(tokens, scale, dtype) if cache.dtype == FP8_DTYPE else tokens.to(dtype)


def read_prefix(
    kv: PagedKV, block_table: torch.Tensor, num_tokens: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `num_tokens` tokens of a sequence, key and value [num_tokens, K, D]."""
    block_ids = block_table[: -(-num_tokens // kv.block_size)].long()[None]
    key = gather_blocks(kv.key_cache, kv.k_scale, block_ids, dtype)[0, :, :num_tokens]
    value = gather_blocks(kv.value_cache, kv.v_scale, block_ids, dtype)[0, :, :num_tokens]
    return key.transpose(0, 1), value.transpose(0, 1)


@dataclass(eq=False)
class DecodeGroup:
    """Decode rows of similar lengths, padded to `padded` slots. Shared by all layers of a step."""

    rows: torch.Tensor  # int64 [N]: which decode rows
    block_ids: torch.Tensor  # int64 [N, B], 0 past a row's end
    lengths: torch.Tensor  # int64 [N]
    positions: torch.Tensor  # int64 [padded]
    lengths_cpu: tuple[int, ...]
    padded: int
    _masks: dict[tuple[int | None, int | None, bool], torch.Tensor] = field(default_factory=dict)

    def allowed(self, spec: AttentionSpec) -> torch.Tensor:
        """bool [N, 1 | H, 1, padded]: the slots each row may look at."""
        if spec.blocksparse is not None:
            return self._mask(spec)
        key = (spec.sliding_window, spec.attention_chunk, spec.hides_first)
        if key not in self._masks:
            self._masks[key] = self._mask(spec)
        return self._masks[key]

    def zero_unused(self, tokens: torch.Tensor) -> None:
        """Zeroes the slots past each row's end in gathered `tokens` [N, K, padded, D]: they may hold NaN."""
        if tokens.device.type == "cpu":
            for row, length in enumerate(self.lengths_cpu):
                tokens[row, :, length:].zero_()
        else:
            inside = self.positions[None, :] < self.lengths[:, None]
            tokens.masked_fill_(~inside[:, None, :, None], 0)

    def _mask(self, spec: AttentionSpec) -> torch.Tensor:
        inside = self.positions[None, None, :] < self.lengths[:, None, None]
        allowed = mask_of(spec, (self.lengths - 1)[:, None], self.positions, inside)
        allowed[..., 0] |= (self.lengths == 0)[:, None, None]  # an empty row attends to a zeroed value: output 0
        return allowed


def decode_groups(rows: RowBatch, block_size: int) -> list[DecodeGroup]:
    """The groups of these rows, made once a step. A single group keeps the rows' order."""
    key = ("decode_groups", block_size)
    if key not in rows.scratch:
        rows.scratch[key] = [_make_group(rows, members, block_size) for members in similar_lengths(rows.seq_lens_cpu)]
    groups: list[DecodeGroup] = rows.scratch[key]
    return groups


def similar_lengths(seq_lens: tuple[int, ...]) -> list[list[int]]:
    """Rows grouped so that padding at most doubles a group, and no group gathers more than GROUP_TOKENS.

    Rows that all fit one group come back in their own order.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(seq_lens)), key=lambda row: -seq_lens[row]):
        length = max(seq_lens[row], 1)
        if not groups or (length * 2 < longest and longest > 256) or (len(groups[-1]) + 1) * longest > GROUP_TOKENS:
            groups.append([])
            longest = length
        groups[-1].append(row)
    return [list(range(len(seq_lens)))] if len(groups) == 1 else groups


def _make_group(rows: RowBatch, members: list[int], block_size: int) -> DecodeGroup:
    device = rows.seq_lens.device
    lengths_cpu = tuple(rows.seq_lens_cpu[row] for row in members)
    num_blocks = max(1, -(-max(lengths_cpu, default=1) // block_size))
    index = torch.tensor(members, device=device, dtype=torch.long)
    lengths = rows.seq_lens[index].long()
    used = torch.arange(num_blocks, device=device)[None, :] * block_size < lengths[:, None]
    return DecodeGroup(
        rows=index,
        block_ids=rows.block_tables[index, :num_blocks].long().where(used, 0),
        lengths=lengths,
        positions=torch.arange(num_blocks * block_size, device=device),
        lengths_cpu=lengths_cpu,
        padded=num_blocks * block_size,
    )
