"""The trial that a model of transformers stands before it serves: our paged attention against the model's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.layers import make_layers, sinks_of
from tandem.engine.models.hf.model import HFModel
from tandem.kernels.api.attention import bind_kv_cache
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadataBuilder

LENGTHS = (37, 9)  # tokens of the two sequences, computed together
FIRST = (21, 4)  # of which so many in a first step
BLOCK = 16
JUDGED = 0.75  # of the tokens: in 16 bits some may go to other experts by a rounding
# Largest error of those tokens' hidden states, over their lengths: docs/measurements.md#models-of-transformers.
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}


@torch.inference_mode()
def check_against_own_attention(model: HFModel, device: torch.device, dtype: torch.dtype) -> None:
    """Computes two sequences in one row, in two steps over scattered blocks, and each one alone by transformers' eager
    attention. Raises CheckpointError when they differ: then the model does something that we don't know of."""
    generator = torch.Generator().manual_seed(7)
    embedding: Any = model.decoder.get_input_embeddings()
    most = min(model.vocab_size, int(embedding.num_embeddings))
    prompts = [torch.randint(0, most, (length,), generator=generator).to(device) for length in LENGTHS]
    ours, own = _paged(model, prompts, device, dtype), _alone(model, prompts)
    error_T = ((ours - own).float().norm(dim=-1) / own.float().norm(dim=-1).clamp_min(1e-9)).nan_to_num(float("inf"))
    error = float(error_T.quantile(JUDGED))
    if not error <= LARGEST_ERROR[dtype]:
        raise CheckpointError(
            f"{model.config.architecture} can't be served: over paged attention its hidden states differ from those of "
            f"its own attention by {error:.1%}; please report the model"
        )


def _alone(model: HFModel, prompts: list[torch.Tensor]) -> torch.Tensor:
    """Hidden states [T, E], by the model's own attention and masks."""
    config: Any = model.decoder.config  # one for all modules; `set_attn_implementation` refuses some classes
    config._attn_implementation = "eager"
    try:
        hidden = [
            model.decoder(
                input_ids=prompt[None],
                position_ids=torch.arange(len(prompt), device=prompt.device)[None],
                use_cache=False,
            ).last_hidden_state[0]
            for prompt in prompts
        ]
    finally:
        config._attn_implementation = NAME
    return torch.cat(hidden)


def _paged(model: HFModel, prompts: list[torch.Tensor], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Hidden states [T, E], by our attention over a small pool, in two steps."""
    config = model.config
    layers = make_layers(config.layers, "auto", sinks_of(model.decoder, config.layers))
    tables = np.array([[5, 2, 4], [1, 3, 0]], np.int32)
    shape = (6, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    bind_kv_cache(layers, pool)
    parts: list[list[torch.Tensor]] = [[], []]
    for starts, ends in (((0, 0), FIRST), (FIRST, LENGTHS)):
        positions = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        slots = [table[at // BLOCK] * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)]
        metadata = AttentionMetadataBuilder().build(
            np.array([len(at) for at in positions], np.int64),
            np.array(ends, np.int64),
            torch.from_numpy(tables).to(device),
            torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(device),
            device,
        )
        tokens = torch.cat([prompt[start:end] for prompt, start, end in zip(prompts, starts, ends, strict=True)])
        with set_forward_context(ForwardContext(metadata, layers)):
            hidden = model(tokens, torch.from_numpy(np.concatenate(positions)).to(device))
        for part, rows in zip(parts, hidden.split([len(at) for at in positions]), strict=True):
            part.append(rows)
    return torch.cat([torch.cat(part) for part in parts])
