"""Logits of a whole prompt by this engine's model, computed in chunks over a pool whose blocks are not in order."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tandem.engine.models.decoder import DecoderModel
from tandem.kernels.api.attention import bind_kv_cache
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadataBuilder

BLOCK = 16
CPU = torch.device("cpu")


def logits_in_chunks(model: DecoderModel, token_ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """fp32 [T, V]."""
    config = model.config
    num_blocks = -(-len(token_ids) // BLOCK)
    planes = 2 if config.latent_size is None else 1
    pool = torch.zeros(num_blocks + 3, config.num_kv_heads, config.num_layers, planes, BLOCK, config.head_dim)
    bind_kv_cache(model.attention_layers, pool)
    table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(1))[:num_blocks].to(torch.int32)
    parts, start = [], 0
    for chunk in chunks:
        positions = torch.arange(start, start + chunk)
        slots = table[positions // BLOCK].long() * BLOCK + positions % BLOCK
        metadata = AttentionMetadataBuilder().build([chunk], [start + chunk], table[None], slots, CPU)
        context = ForwardContext(attn_metadata=metadata, no_compile_layers=model.attention_layers)
        with torch.inference_mode(), set_forward_context(context):
            parts.append(model.compute_logits(model(torch.tensor(token_ids[start : start + chunk]), positions)))
        start += chunk
    return torch.cat(parts)
