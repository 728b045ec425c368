"""Dense attention over gathered keys and values, with masks and biases for every option. Used by gathering backends.

Masks are bool [N, 1 | H, L, S]: true where a query may look. Biases are float32 [N, H, L, S].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem.kernels.api.spec import AttentionSpec


def plain_causal(spec: AttentionSpec, num_earlier: int, causal: bool) -> bool:
    """Whether torch's own kernels need no explicit mask: nothing cached before, no option that hides or shifts."""
    has_options = not spec.sees_every_token or spec.alibi_slopes is not None
    return not has_options and (num_earlier == 0 or not causal)


def mask_of(
    spec: AttentionSpec, query_positions: torch.Tensor, positions: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Narrows `allowed` [N, L, S] by window, chunk, hidden token and sparse pattern; query_positions [N, L], positions
    [S]."""
    allowed = allowed[:, None]
    queries = query_positions[:, None, :, None]
    if spec.sliding_window is not None:
        allowed = allowed & (positions > queries - spec.sliding_window)
    if spec.attention_chunk is not None:
        allowed = allowed & (positions >= queries - queries % spec.attention_chunk)
    if spec.hides_first:
        allowed = allowed & (positions > 0)
    if spec.blocksparse is not None:
        allowed = allowed & _sparse_pattern(spec, queries, positions)
    return allowed


def bias_of(
    spec: AttentionSpec, query_positions: torch.Tensor, positions: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """ALiBi: slope_h * (key position - query position), float32 [N, H, L, S]."""
    slopes = spec.slopes_on(device)
    if slopes is None:
        return None
    distance = (positions - query_positions[:, None, :, None]).float()
    return slopes[None, :, None, None] * distance


def sinks_of(spec: AttentionSpec, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The layer's sinks, float32, in `shape`, which broadcasts to that of the scores; None: it has none."""
    sinks = spec.sinks_on(device)
    return None if sinks is None else sinks.reshape(shape)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: torch.Tensor | None,
    bias: torch.Tensor | None,
    spec: AttentionSpec,
    is_causal: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """query [A, B, L, D], key/value [A, B, S, D], masks broadcastable to [A, B, L, S] -> [A, B, L, D].

    torch's fused attention where it can express the options; else scores in at least float32, capped, then biased.
    `sinks`, broadcastable to [A, B, L, 1]: one more score a query, with no value.
    """
    if spec.logits_soft_cap is None and bias is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=is_causal, scale=spec.scale
        )
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).transpose(-1, -2) * spec.scale
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    if bias is not None:
        scores = scores + bias
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        sink = sinks.to(wide).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    if allowed is not None:
        # Queries that see no key give zeros, as in torch.
        weights = weights.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return (weights @ value.to(wide)).to(query.dtype)


def _sparse_pattern(spec: AttentionSpec, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """bool [N, H, L, S] of BlockSparse's rule; queries [N, 1, L, 1]."""
    sparse = spec.blocksparse
    assert sparse is not None
    heads = torch.arange(spec.num_heads, device=positions.device)
    if sparse.head_sliding_step >= 0:
        offset = (sparse.tp_rank * spec.num_heads + heads) * sparse.head_sliding_step + 1
    else:
        kv_heads = sparse.tp_rank * spec.num_kv_heads + heads // spec.group_size
        offset = -kv_heads * sparse.head_sliding_step + 1
    key_blocks = torch.div(positions, sparse.block_size, rounding_mode="floor")
    query_blocks = torch.div(queries, sparse.block_size, rounding_mode="floor")
    vertical = (key_blocks + offset[None, :, None, None]) % sparse.vert_stride == 0
    return vertical | (key_blocks > query_blocks - sparse.local_blocks)
