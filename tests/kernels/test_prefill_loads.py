"""What the Hopper prefill kernel's loading warp fetches: its code, run as plain Python over a model of the copy engine.

The model knows what memory there is. It refuses a box that reads outside of it, and one without any row whose
descriptor starts outside of it, which a GPU would touch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon", reason="this triton has no Gluon")

from tandem.kernels.check.sample_batches import PagedBatch, random_batch
from tandem.kernels.triton_kernels.prefill import prefill_launch, prefill_loads

QUERIES, HALF, COLUMNS = prefill_launch.QUERIES, prefill_launch.BOX_ROWS, prefill_launch.BOX_COLUMNS


class Number(int):
    """A scalar of the kernel: has `to`, and stays one under arithmetic and comparison."""

    def to(self, _dtype: object) -> Number:
        return self


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "eq", "ne", "lt", "le", "gt", "ge"):
    _operation = getattr(operator, f"__{_name}__")
    setattr(Number, f"__{_name}__", lambda x, y, do=_operation: Number(do(int(x), int(y))))
    setattr(Number, f"__r{_name}__", lambda x, y, do=_operation: Number(do(int(y), int(x))))
Number.__hash__ = int.__hash__  # type: ignore[method-assign]


class Pointer:
    def __init__(self, values: torch.Tensor, offset: int = 0) -> None:
        self.values, self.offset = values.flatten(), offset

    def __add__(self, more: int) -> Pointer:
        return Pointer(self.values, self.offset + int(more))


class Chunks:
    """Shared memory in chunks of [rows, COLUMNS]; views by other chunk sizes see the same elements."""

    def __init__(self, elements: torch.Tensor, rows: int) -> None:
        self.elements, self.rows = elements, rows

    def index(self, index: int) -> torch.Tensor:
        size = self.rows * COLUMNS
        assert 0 <= index < self.elements.numel() // size
        return self.elements[index * size : (index + 1) * size].view(self.rows, COLUMNS)


class Barrier:
    def __init__(self, seen: Any) -> None:
        self.seen, self.missing = seen, 0

    def index(self, slot: int) -> tuple[Barrier, int]:
        return self, int(slot)


class CopyEngine:
    """Boxes of descriptors over the memory of some tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.memory = [
            (tensor.untyped_storage().data_ptr(), torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage()))
            for tensor in tensors
        ]

    def at(self, address: int, count: int = 1) -> torch.Tensor:
        for start, elements in self.memory:
            first = (address - start) // 2
            if first >= 0 and first + count <= elements.numel():
                return elements[first : first + count]
        raise AssertionError(f"touches memory that no tensor has: {address:x}")

    def load(self, desc: Any, corner: Sequence[int], barrier: tuple[Barrier, int], chunk: torch.Tensor) -> None:
        base, shape, box = desc.base.data_ptr(), desc.shape, desc.block_shape
        *outer, column = (int(place) for place in corner)
        assert chunk.shape == (box[-2], box[-1])
        inside_any = False
        for row in range(box[-2]):
            places = [*outer[:-1], outer[-1] + row]
            inside = all(0 <= place < size for place, size in zip((*places, column), shape, strict=True))
            offset = sum(place * stride for place, stride in zip(places, desc.strides, strict=False)) + column
            chunk[row] = self.at(base + 2 * offset, box[-1]) if inside else 0.0
            inside_any = inside_any or inside
        if not inside_any:
            self.at(base)
        ready, slot = barrier
        ready.missing -= 2 * chunk.numel()
        assert ready.missing >= 0
        if ready.missing == 0:
            ready.seen(slot)


def loading_code(engine: CopyEngine, program: int, num_programs: int) -> SimpleNamespace:
    """prefill_loads.py as plain functions."""

    def expect(barrier: tuple[Barrier, int], num_bytes: int) -> None:
        assert barrier[0].missing == 0
        barrier[0].missing = num_bytes

    def load(pointer: Pointer, mask: bool = True, other: int = 0) -> Number:
        return Number(pointer.values[pointer.offset]) if mask else Number(other)

    language = SimpleNamespace(
        constexpr=lambda value: value, int32=None, int64=None, load=load, static_range=range,
        program_id=lambda _axis: Number(program), num_programs=lambda _axis: Number(num_programs),
        minimum=lambda x, y: Number(min(x, y)), maximum=lambda x, y: Number(max(x, y)),
        where=lambda condition, x, y: Number(x if condition else y),
    )  # fmt: skip
    names: dict[str, Any] = {
        "gluon": SimpleNamespace(jit=lambda function: function), "gl": language,
        "mbarrier": SimpleNamespace(wait=lambda *_args, **_options: None, expect=expect),
        "tma": SimpleNamespace(async_copy_global_to_shared=engine.load),
    }  # fmt: skip
    source = Path(prefill_loads.__file__).read_text()
    code = source.replace("from triton", "pass  # ").replace("HALF: gl.constexpr =", "HALF: int =")
    exec(compile(code, prefill_loads.__file__, "exec", dont_inherit=True), names)
    return SimpleNamespace(**names)


def run_program(
    batch: PagedBatch, program: int, num_programs: int, window: int | None, has_cache: bool, causal: bool = True
) -> int:
    """Runs the loading warp of one program and checks every tile it brings. Returns how many there were."""
    kv, meta = batch.kv(), batch.metadata
    heads, kv_heads, size = batch.query.shape[1], batch.key.shape[1], batch.query.shape[2]
    constants = prefill_launch.hopper_constants(
        heads, heads // kv_heads, size, kv.block_size, has_cache, False, window is not None, False, causal
    )  # fmt: skip
    panels, stages, tile_keys = constants["D"] // COLUMNS, constants["STAGES"], constants["KEY_TILE"]
    q_slots, dtype = constants["Q_SLOTS"], batch.query.dtype
    work = torch.from_numpy(prefill_launch.list_work(meta.query_lens_cpu, meta.seq_lens_cpu))
    engine = CopyEngine((batch.query, batch.key, batch.value, batch.pool))
    code = loading_code(engine, program, num_programs)

    def rows_of(tensor: torch.Tensor) -> Any:
        return prefill_launch._describe_rows(tensor.data_ptr(), dtype, tensor.shape, tensor.stride())

    apart = kv.value_cache.data_ptr() - kv.key_cache.data_ptr()
    tiles = prefill_launch._cache_tiles(
        kv.key_cache.data_ptr(), dtype, kv.key_cache.shape, kv.key_cache.stride(), apart
    )  # fmt: skip
    block_size = kv.key_cache.shape[2] if has_cache else HALF
    box = prefill_launch.box_of(block_size)
    q_memory = torch.full((q_slots * QUERIES * size,), torch.nan, dtype=dtype)
    k_memory, v_memory = (torch.full((stages * tile_keys * size,), torch.nan, dtype=dtype) for _ in range(2))
    brought: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}

    def barrier(name: str, memory: torch.Tensor, halves_apart: bool) -> Barrier:
        def seen(slot: int) -> None:
            if halves_apart:  # chunks by half and panel
                tile = memory.view(-1, 2, panels, HALF, COLUMNS)[slot]
                whole = tile.transpose(1, 2).reshape(QUERIES, size)
            else:  # by panel, then rows
                whole = memory.view(-1, panels, tile_keys, COLUMNS)[slot].transpose(0, 1).reshape(tile_keys, size)
            brought[name].append(whole.clone())

        return Barrier(seen)

    unused = Barrier(None)
    code.load_all(
        prefill_launch._describe_queries(batch.query.data_ptr(), dtype, batch.query.shape, batch.query.stride()),
        rows_of(batch.key), rows_of(batch.value), tiles.desc,
        prefill_launch._describe_nothing(batch.query.data_ptr(), dtype, box), Chunks(q_memory, HALF),
        Chunks(k_memory, HALF), Chunks(v_memory, HALF), Chunks(k_memory, box), Chunks(v_memory, box),
        barrier("q", q_memory, True), unused, barrier("k", k_memory, False), unused, barrier("v", v_memory, False),
        unused, Pointer(work), len(work) * heads, Pointer(meta.block_tables), meta.block_tables.stride(0),
        window or 0, tiles.block_units, tiles.head_units, tiles.value_units,
        heads, heads // kv_heads, block_size, tile_keys, box, panels, stages, q_slots, has_cache, window is not None,
        causal,
    )  # fmt: skip
    position = 0
    for turn in range(code.count_items(len(work) * heads)):
        item = code.read_item(Pointer(work), turn, len(work) * heads, heads)
        position = check_item(batch, code, item, brought, turn, position, window, tile_keys, has_cache, causal)
    assert len(brought["k"]) == len(brought["v"]) == position
    return position


def check_item(
    batch: PagedBatch,
    code: Any,
    item: Sequence[int],
    brought: Any,
    turn: int,
    position: int,
    window: int | None,
    tile_keys: int,
    has_cache: bool,
    causal: bool,
) -> int:
    head, row, query_tile, first_token, query_len, num_earlier = item
    group = batch.query.shape[1] // batch.key.shape[1]
    first = first_token + query_tile * QUERIES
    count = min(QUERIES, query_len - query_tile * QUERIES)
    assert torch.equal(brought["q"][turn][:count], batch.query[first : first + count, head])
    plan = code.plan_item(
        query_tile, query_len, num_earlier, window or 0, tile_keys, has_cache, window is not None, causal
    )  # fmt: skip
    first_new, partial, prefix_tiles, steps, masked_steps = plan
    seen: set[int] = set()
    for step in range(steps):
        in_prefix, index = code.place_of(
            step, query_tile, first_new, partial, prefix_tiles, tile_keys, has_cache, causal
        )  # fmt: skip
        if in_prefix:
            keys, values = earlier_tile(batch, row, head // group, index, tile_keys)
        else:
            tokens = slice(first_token + index * tile_keys, first_token + min((index + 1) * tile_keys, query_len))
            keys, values = batch.key[tokens, head // group], batch.value[tokens, head // group]
        for name, expected in (("k", keys), ("v", values)):
            tile = brought[name][position + step]
            assert torch.equal(tile[: len(expected)], expected)
            assert not tile[len(expected) :].any()  # zeros, not what the memory after the row holds
        whole_tiles = query_tile * (QUERIES // tile_keys) if causal and not in_prefix else prefix_tiles
        partly_seen = index >= whole_tiles
        assert step < masked_steps or not partly_seen
        offset, end = (0, num_earlier) if in_prefix else (num_earlier, query_len)
        seen.update(range(offset + index * tile_keys, offset + min((index + 1) * tile_keys, end)))
    if not causal:
        assert seen == set(range(num_earlier) if has_cache else range(query_len))
        return position + steps
    last_query = num_earlier + query_tile * QUERIES + count - 1
    lowest = max(num_earlier + query_tile * QUERIES - window + 1, 0) if window else 0
    assert seen >= set(range(lowest, last_query + 1))
    return position + steps


def earlier_tile(
    batch: PagedBatch, row: int, kv_head: int, index: int, tile_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    kv, meta = batch.kv(), batch.metadata
    size = kv.key_cache.shape[2]
    earlier = meta.seq_lens_cpu[row] - meta.query_lens_cpu[row]
    places = np.arange(index * tile_keys, min((index + 1) * tile_keys, earlier))
    blocks = np.asarray(batch.block_tables[row])[places // size]
    return kv.key_cache[blocks, kv_head, places % size], kv.value_cache[blocks, kv_head, places % size]


@pytest.mark.parametrize(
    ("block", "size"),
    [(64, 64), (48, 64), (16, 256), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((16, 128), (64, 256)))],
)
@pytest.mark.parametrize("window", [None, 100])
def test_tiles_hold_their_rows_and_zeros(block: int, size: int, window: int | None) -> None:
    batch = random_batch(
        (1, 2, 65, 200, 3), (1, 70, 100, 620, 15), num_heads=2, num_kv_heads=1, head_size=size, block_size=block,
        dtype=torch.bfloat16,
    )  # fmt: skip
    assert sum(run_program(batch, program, 3, window, True) for program in range(3)) >= 10


def test_tiles_of_rows_without_a_cache() -> None:
    lengths = (1, 63, 64, 129, 5)
    batch = random_batch(
        lengths, lengths, num_heads=4, num_kv_heads=2, head_size=128, block_size=64, dtype=torch.bfloat16
    )
    tiles = sum(run_program(batch, program, 2, None, False) for program in range(2))
    assert tiles == 4 * (1 + 1 + 1 + (1 + 2) + 1)


@pytest.mark.parametrize("size", [64, 256])
def test_tiles_of_encoders_and_of_cross_attention(size: int) -> None:
    """All of a row's new tokens, or its prefix alone, whatever the query tile."""
    new, total = (1, 63, 64, 129, 200), (17, 64, 128, 429, 840)
    sizes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_size": size, "block_size": 16}
    for lengths, has_cache in (((new, new), False), ((new, total), True)):
        batch = random_batch(*lengths, dtype=torch.bfloat16, **sizes)
        assert sum(run_program(batch, program, 3, None, has_cache, False) for program in range(3)) >= 14


def test_every_item_is_done_once() -> None:
    for num_items, programs in ((1, 1), (5, 5), (23, 4), (24, 4), (264, 132)):
        work = torch.arange(num_items, dtype=torch.int32)[:, None].expand(num_items, 8).contiguous()
        done = []
        for program in range(programs):
            code = loading_code(CopyEngine(()), program, programs)
            turns = code.count_items(Number(num_items))
            done += [code.read_item(Pointer(work), turn, num_items, 1)[1] for turn in range(turns)]
        assert sorted(done) == list(range(num_items))
