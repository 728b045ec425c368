"""Paged decode attention as captured decode steps run it: GB/s of keys and values, beside a copy in the same run.

    python benchmarks/decode_attention.py [--prefixes]

32 query and 8 KV heads of 128, bf16 queries, blocks of 64 in a block-major pool, every layer of a step over memory of
its own. fp8: the time over that of a bf16 cache. Shared prefixes: reading them once against every row for itself;
`--prefixes` adds the batches by which kernels/prefixes/prefix_groups.py was tuned.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tandem.kernels.api.backend import PagedKV
from tandem.kernels.api.metadata import RowBatch
from tandem.kernels.api.spec import AttentionSpec
from tandem.kernels.backends.triton import TritonOps
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.kernels.check.measure import median_event_seconds
from tandem.kernels.prefixes.prefix_groups import SharingCosts, choose_groups, chunk_members
from tandem.kernels.prefixes.shared_prefix import PrefixBuffers, SharedPrefixes

HEADS, KV_HEADS, SIZE, BLOCK = 32, 8, 128, 64
MOST_LAYERS = 32
POOL_VALUES = 6 << 30
LONGEST = 131072  # what a captured step is told
SHAPES = {
    "8 x 8k": [8192] * 8,
    "64 x 2k": [2048] * 64,
    "64 x 8k": [8192] * 64,
    "128 x 1k": [1024] * 128,
    "1 x 128k": [131072],
}
# (rows, shared tokens) of each group; every row has OWN_TOKENS more.
OWN_TOKENS = 288
TARGET_GROUPS = [(8, 4096)] * 8
TUNED_BY: list[list[tuple[int, int]]] = [
    [(2, 2048)], [(2, 2048)] * 4, [(2, 4096)] * 4, [(4, 4096)], [(4, 8192)], [(2, 16384)], [(2, 32768)],
    [(4, 512)] * 8, [(8, 256)] * 8, [(8, 512)] * 8, [(8, 1024)] * 8, [(16, 512)] * 4,
    [(64, 256)], [(64, 512)], [(64, 1024)], [(256, 256)], [(256, 512)],
]  # fmt: skip


@dataclass(frozen=True)
class Step:
    """The decode attention of one step, layer after layer."""

    pool: torch.Tensor  # [blocks, K, layers, 2, S, D]
    query: torch.Tensor
    rows: RowBatch
    tables: np.ndarray
    lengths: list[int]

    @classmethod
    def make(cls, memory: torch.Tensor, lengths: list[int], shared: Sequence[tuple[int, int]] = ()) -> Step:
        """A step over random blocks of `memory`. `shared`: (rows, tokens) of leading groups of rows; their tokens exist
        once."""
        counts = [-(-length // BLOCK) for length in lengths]
        num_blocks = sum(counts) - sum((rows - 1) * (tokens // BLOCK) for rows, tokens in shared)
        layers = min(MOST_LAYERS, memory.numel() // (num_blocks * KV_HEADS * 2 * BLOCK * SIZE))
        shape = num_blocks, KV_HEADS, layers, 2, BLOCK, SIZE
        pool = memory[: num_blocks * KV_HEADS * layers * 2 * BLOCK * SIZE].view(shape)
        ids = np.random.default_rng(0).permutation(num_blocks).tolist()
        tables = np.zeros((len(lengths), max(counts)), np.int32)
        first = 0
        for num_rows, tokens in shared:
            common = [ids.pop() for _ in range(tokens // BLOCK)]
            tables[first : first + num_rows, : len(common)] = common
            for row in range(first, first + num_rows):
                tables[row, len(common) : counts[row]] = [ids.pop() for _ in range(counts[row] - len(common))]
            first += num_rows
        for row in range(first, len(lengths)):
            tables[row, : counts[row]] = [ids.pop() for _ in range(counts[row])]
        seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        starts = torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda")
        ones = (1,) * len(lengths)
        rows_of_step = RowBatch(starts, seq_lens, torch.from_numpy(tables).cuda(), ones, tuple(lengths), 1, LONGEST)
        query = torch.randn(len(lengths), HEADS, SIZE, dtype=torch.bfloat16, device="cuda")
        return cls(pool, query, rows_of_step, tables, lengths)

    def prefixes(self) -> SharedPrefixes | None:
        """The prefixes that the engine would find, but without asking whether they pay."""
        members = chunk_members(HEADS // KV_HEADS)
        whole = (np.array(self.lengths) - 1) // BLOCK
        groups = choose_groups(self.tables, np.arange(len(self.lengths)), whole, BLOCK, SharingCosts(members, 1 << 30))
        buffers = PrefixBuffers(len(self.lengths), members, torch.device("cuda"))
        buffers.load(groups, BLOCK)
        return buffers.prefixes

    def microseconds(self, prefixes: SharedPrefixes | None = None) -> float:
        """Time of one layer: the median over replays of a captured step."""
        spec = AttentionSpec(
            HEADS, SIZE, SIZE**-0.5, KV_HEADS, kv_cache_dtype="fp8" if self.pool.element_size() == 1 else "auto"
        )
        layers = [PagedKV.of_layer(self.pool[:, :, layer], 1.0, 1.0) for layer in range(self.pool.shape[2])]

        def run() -> None:
            rows = replace(self.rows, shared_prefixes=prefixes, scratch={})
            for kv in layers:
                TritonOps.decode(self.query, kv, rows, spec)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return median_microseconds(graph.replay) / len(layers)


def median_microseconds(run: Callable[[], object]) -> float:
    return 1e6 * median_event_seconds(run, 12)


def copy_rate(memory: torch.Tensor) -> float:
    """Bytes read and written a microsecond, in GB/s."""
    half = memory.numel() // 2
    source, target = memory[:half], memory[half : 2 * half]
    return 2 * source.nbytes / median_microseconds(lambda: target.copy_(source)) / 1e3


def print_shapes(memory: torch.Tensor, fp8_memory: torch.Tensor) -> None:
    print(f"{'rows x tokens':14} {'bf16 us':>8} {'GB/s':>6} {'fp8 us':>8} {'GB/s':>6} {'fp8 / bf16':>10}")
    for name, lengths in SHAPES.items():
        size = sum(lengths) * KV_HEADS * 2 * SIZE
        wide, narrow = (Step.make(pool, lengths).microseconds() for pool in (memory, fp8_memory))
        print(f"{name:14} {wide:8.1f} {2 * size / wide / 1e3:6.0f} {narrow:8.1f} {size / narrow / 1e3:6.0f} "
              f"{narrow / wide:10.3f}", flush=True)  # fmt: skip


def print_sharing(memory: torch.Tensor, batches: Sequence[Sequence[tuple[int, int]]]) -> None:
    print(f"{'groups of rows x shared tokens, ' + str(OWN_TOKENS) + ' own':40} {'apart us':>9} {'shared us':>9} "
          f"{'times':>6} {'chosen':>7}")  # fmt: skip
    costs = SharingCosts(chunk_members(HEADS // KV_HEADS), KV_HEADS * 2 * SIZE * 2)
    for groups in batches:
        lengths = [tokens + OWN_TOKENS for rows, tokens in groups for _ in range(rows)]
        step = Step.make(memory, lengths, groups)
        apart, shared = step.microseconds(), step.microseconds(step.prefixes())
        saved = sum(max(0, costs.saved_bytes(rows, tokens)) for rows, tokens in groups)
        name = f"{len(groups)} of {groups[0][0]} x {groups[0][1]}"
        print(
            f"{name:40} {apart:9.1f} {shared:9.1f} {apart / shared:6.2f} {costs.is_worthwhile(saved)!s:>7}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefixes", action="store_true", help="also the batches by which sharing was tuned")
    args = parser.parse_args()
    memory = torch.empty(POOL_VALUES, dtype=torch.bfloat16, device="cuda")
    for piece in memory.split(1 << 30):
        piece.normal_()
    fp8_memory = torch.empty(POOL_VALUES, dtype=FP8_DTYPE, device="cuda")
    for piece, source in zip(fp8_memory.split(1 << 29), memory.split(1 << 29), strict=True):
        piece.copy_(source)
    print(f"{torch.cuda.get_device_name()}; copy {copy_rate(memory):.0f} GB/s")
    print_shapes(memory, fp8_memory)
    print_sharing(memory, [TARGET_GROUPS, *(TUNED_BY if args.prefixes else [])])


if __name__ == "__main__":
    main()
