"""Pieces that the kernels share. Importing this decides whether they run interpreted (TRITON_INTERPRET)."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tandem.kernels.api.errors import UnsupportedOptionError

INTERPRET = bool(triton.knobs.runtime.interpret)
INTERPRETED: tl.constexpr = tl.constexpr(INTERPRET)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
MIN_TILE = 16  # tl.dot's smallest inner dimension


@triton.jit
def begin(PDL: tl.constexpr):
    """First line of a kernel launched with `overlap`: lets the next one start, waits for the one before to end.

    Every kernel of such a chain waits, so all that came earlier on the stream is complete and visible after it.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def start(PDL: tl.constexpr):
    """The first half of `begin`, for a kernel that first loads what the one before it doesn't write."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait(PDL: tl.constexpr):
    """The second half of `begin`."""
    if PDL:
        gdc_wait()


@triton.jit
def begin_late(PDL: tl.constexpr):
    """Does what `begin` does, but later kernels start only once this one has waited: what lies before it on the stream
    is complete for all that follow, even before they wait."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def fetch_lines(pointers, WHOLE: tl.constexpr):
    """Has the L2 cache ask memory for lines of 128 bytes; not WHOLE: of each for the sector that is pointed into. It is
    no read: what another kernel writes meanwhile is what a later load finds."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], 128; mov.b32 $0, 0;"
        if WHOLE
        else "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_row(pointer, SIZE: tl.constexpr):
    """Fetches SIZE contiguous numbers by `fetch_lines`."""
    of_line: tl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth
    lines: tl.constexpr = triton.next_power_of_2((SIZE + of_line - 1) // of_line)
    fetch_lines(pointer + tl.minimum(tl.arange(0, lines) * of_line, SIZE - 1), False)


@cache
def overlap(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels that call `begin`: with programmatic dependent launch where the GPU has it, a kernel's
    start-up hides behind the end of its predecessor (CUDA programming guide, "Programmatic Dependent Launch")."""
    if INTERPRET or device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def dot(a, b):
    """a [M, K] @ b [K, N] in fp32. The interpreter's bf16 product is wrong, so it multiplies in fp32."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit
def load_rows(pointer, rows, stride_row, row_mask, HEAD_SIZE: tl.constexpr, D_PAD: tl.constexpr):
    """[rows, D_PAD] of a matrix with contiguous columns; masked rows and columns past HEAD_SIZE are zeros."""
    columns = tl.arange(0, D_PAD)
    offsets = rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
    return tl.load(pointer + offsets, mask=row_mask[:, None] & (columns < HEAD_SIZE)[None, :], other=0.0)


@triton.jit
def oldest_seen(positions, window, WINDOW: tl.constexpr):
    """The first position that queries at these see, as spec.Reach says: WINDOW is its kind, `window` its size."""
    if WINDOW == 2:
        return positions // window * window
    elif WINDOW == 3:
        return positions * 0 + window
    else:
        return positions - window + 1


@triton.jit
def masked_scores(
    query,
    key,
    query_positions,
    key_positions,
    key_mask,
    slopes,
    scale,
    soft_cap,
    window,
    sparse_local,
    sparse_shift,
    HAS_ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SPARSE_STRIDE: tl.constexpr,
    SPARSE_BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Scores times log2(e), [M, N] fp32: scaled, capped, biased; -inf where the key is hidden. Not CAUSAL: the future
    is seen, too, by a window as far as the past."""
    scores = dot(query, tl.trans(key)) * scale
    if HAS_SOFT_CAP:
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / soft_cap)) + 1.0))  # soft_cap * tanh
    if HAS_ALIBI:
        scores += slopes[:, None] * (key_positions[None, :] - query_positions[:, None]).to(tl.float32)
    allowed = key_mask[None, :]
    if CAUSAL:
        allowed = allowed & (key_positions[None, :] <= query_positions[:, None])
    if WINDOW:
        allowed = allowed & (key_positions[None, :] >= oldest_seen(query_positions, window, WINDOW)[:, None])
        if not CAUSAL:
            allowed = allowed & (key_positions[None, :] < query_positions[:, None] + window)
    if SPARSE_STRIDE > 0:
        blocks = key_positions // SPARSE_BLOCK
        vertical = (blocks + sparse_shift) % SPARSE_STRIDE == 0
        allowed = allowed & (
            vertical[None, :] | (blocks[None, :] > query_positions[:, None] // SPARSE_BLOCK - sparse_local)
        )
    return tl.where(allowed, scores * LOG2_E, float("-inf"))


@triton.jit
def online_softmax(scores, value, peak, total, accumulator):
    """One step of the running softmax (Milakov and Gimelshein): -> (peak [M], total [M], accumulator [M, D])."""
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)  # rows that saw no key yet: no inf - inf
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(peak - base)
    total = total * decay + tl.sum(weights, 1)
    accumulator = accumulator * decay[:, None] + dot(weights.to(value.dtype), value)
    return new_peak, total, accumulator


@triton.jit
def add_sinks(sinks, peak, total, accumulator):
    """Counts each row's sink among its scores: more to divide by, no value. -> (total [M], accumulator [M, D]) over a
    common peak. `sinks` [M] as scores are before they are taken to base 2; once for all parts of a row."""
    sinks *= LOG2_E
    new_peak = tl.maximum(peak, sinks)
    decay = tl.exp2(peak - new_peak)
    return total * decay + tl.exp2(sinks - new_peak), accumulator * decay[:, None]


# As Triton has them, whose own cost the host 6 µs a call: a launch has some, a step launched kernel by kernel hundreds.
def cdiv(count: int, size: int) -> int:
    return -(-count // size)


def next_power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()


def tile_of(block_size: int, limit: int) -> int:
    """Largest power of two up to `limit` that divides `block_size`: a tile never crosses a block."""
    tile = min(limit, block_size & -block_size)
    if tile < MIN_TILE:
        raise UnsupportedOptionError("block_size", f"Triton kernels need a multiple of {MIN_TILE}, got {block_size}")
    return tile


def padded_head_size(head_size: int) -> int:
    return max(16, next_power_of_2(head_size))


def check_cache(key_cache: torch.Tensor, value_cache: torch.Tensor, num_kv_heads: int, head_size: int) -> None:
    """Raises ValueError unless both caches are [num_blocks, K, S, D] with equal strides and contiguous D."""
    if key_cache.shape != value_cache.shape or key_cache.stride() != value_cache.stride():
        raise ValueError(f"key and value cache differ: {tuple(key_cache.shape)}, {tuple(value_cache.shape)}")
    if key_cache.dim() != 4 or key_cache.shape[1] != num_kv_heads or key_cache.shape[3] != head_size:
        raise ValueError(f"cache is {tuple(key_cache.shape)}, expected [blocks, {num_kv_heads}, slots, {head_size}]")
    if key_cache.stride(3) != 1:
        raise ValueError("the cache's head dimension must be contiguous")


def check_tokens(name: str, tensor: torch.Tensor, num_heads: int, head_size: int) -> None:
    """Raises ValueError unless the tensor is [tokens, heads, head_size] with contiguous head_size."""
    if tensor.dim() != 3 or tensor.shape[1:] != (num_heads, head_size):
        raise ValueError(f"{name} is {tuple(tensor.shape)}, expected [tokens, {num_heads}, {head_size}]")
    if tensor.stride(2) != 1:
        raise ValueError(f"{name}'s head dimension must be contiguous")
