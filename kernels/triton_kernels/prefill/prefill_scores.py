"""What the Hopper prefill kernel does with a tile's scores, in Gluon: caps, biases, masks, and the running softmax."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tandem.kernels.triton_kernels.prefill.prefill_loads import HALF, oldest_seen, place_of

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)


@gluon.jit
def mask_scores(
    scores, first_query, query_len, num_earlier, window, step, query_tile, first_new, partial, prefix_tiles,
    KEY_TILE: gl.constexpr, HAS_CACHE: gl.constexpr, WINDOW: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """-inf where a key is not in the prefix, later than the query, or before its window; not CAUSAL: where there is
    no key. Queries count from 0."""
    layout: gl.constexpr = scores.type.layout
    in_prefix, index = place_of(step, query_tile, first_new, partial, prefix_tiles, KEY_TILE, HAS_CACHE, CAUSAL)
    keys = index * KEY_TILE + gl.arange(0, KEY_TILE, layout=gl.SliceLayout(0, layout))
    if CAUSAL:
        queries = first_query + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
        keys = gl.where(in_prefix & (keys >= num_earlier), 1 << 30, keys)
        keys -= gl.where(in_prefix, num_earlier, 0)
        allowed = keys[None, :] <= queries[:, None]
        if WINDOW:
            oldest = oldest_seen(queries + num_earlier, window, WINDOW) - num_earlier
            allowed = allowed & (keys[None, :] >= oldest[:, None])
        return gl.where(allowed, scores, float("-inf"))
    else:
        return gl.where((keys < (num_earlier if HAS_CACHE else query_len))[None, :], scores, float("-inf"))


@gluon.jit
def cap_scores(scores, scale, soft_cap, HAS_SOFT_CAP: gl.constexpr):
    """soft_cap * tanh(scale * score / soft_cap), or the unscaled scores; before any mask, which a cap would undo."""
    if HAS_SOFT_CAP:
        scores = soft_cap * (1.0 - 2.0 / (gl.exp2(scores * (2.0 * LOG2_E * scale / soft_cap)) + 1.0))
    return scores


@gluon.jit
def add_bias(
    scores, slope, first_query, num_earlier, step, query_tile, first_new, partial, prefix_tiles,
    KEY_TILE: gl.constexpr, HAS_CACHE: gl.constexpr, HAS_ALIBI: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """Scores plus slope times the key's distance from the first query; another origin would change no weight."""
    if HAS_ALIBI:
        in_prefix, index = place_of(step, query_tile, first_new, partial, prefix_tiles, KEY_TILE, HAS_CACHE, CAUSAL)
        distance = index * KEY_TILE - gl.where(in_prefix, num_earlier, 0) - first_query
        # As floats by adding them to the bits of 1.5 * 2^23: what converts integers is busy with powers of two, and
        # floats made before the loop would take a register each.
        keys = distance + 0x4B400000 + gl.arange(0, KEY_TILE, layout=gl.SliceLayout(0, scores.type.layout))
        scores = scores + slope * (keys.to(gl.float32, bitcast=True) - 12582912.0)[None, :]
    return scores


@gluon.jit
def weigh(scores, peak, total, factor, MAY_HIDE_ALL: gl.constexpr):
    """One step of the running softmax of factor * scores, to base 2: (weights, new peak, new total, decay of what came
    before). MAY_HIDE_ALL: so far a query may have seen no key."""
    new_peak = gl.maximum(peak, gl.max(scores, 1))
    base = new_peak
    if MAY_HIDE_ALL:
        base = gl.where(new_peak == float("-inf"), 0.0, new_peak)  # no inf - inf
    decay = gl.exp2((peak - base) * factor)
    weights = gl.exp2(scores * factor - (base * factor)[:, None])
    return weights, new_peak, total * decay + gl.sum(weights, 1), decay
