"""Quantised matrices of experts as the kernels read them: e4m3 with a scale an output, or one a group of inputs."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from tandem.kernels.triton_kernels.products.matmul_quantised import widened


@triton.jit
def load_scales(marks, first, row, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    """What a tile's weights are multiplied by: fp32 [rows], or [rows, groups] where a tile has several. `marks`: where
    the scales of the tile's outputs in the first group lie, `first`: the tile's first input, `row`: outputs of a
    group."""
    if GROUP > 0 and GROUP < TILE_K:
        groups = first // GROUP + tl.arange(0, TILE_K // GROUP)
        return tl.load(marks[:, None] + groups[None, :] * row)
    elif GROUP > 0:
        return tl.load(marks + first // GROUP * row)
    else:
        return tl.load(marks)


@triton.jit
def scaled(stored, scales, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr):
    """[TILE_N, TILE_K] in fp32, of e4m3."""
    wide = widened(stored, tl.float32)
    if GROUP > 0 and GROUP < TILE_K:
        grouped = wide.reshape(TILE_N, TILE_K // GROUP, GROUP) * scales[:, :, None]
        return grouped.reshape(TILE_N, TILE_K)
    else:
        return wide * scales[:, None]
