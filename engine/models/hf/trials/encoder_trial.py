"""The part of the trial that is for models with an encoder: hidden states over its output in our blocks, and by the
model's own attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tandem.engine.contracts.wire.encoder import encoder_input
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.encoder import HFEncoder
from tandem.engine.models.hf.layers import make_layers, sinks_of
from tandem.engine.models.hf.model import HFModel
from tandem.kernels.api.attention import bind_kv_cache, metadata_backend
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import slots_of

INPUT_LENGTHS = (23, 50)  # tokens of the encoder's inputs
TABLES = np.array([[5, 2, 4], [1, 3, 0]], np.int32)  # of the decoder's blocks


def encoded_states(
    model: HFModel,
    token_ids: list[np.ndarray],
    first: tuple[int, int],
    block_size: int,
    generator: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ours, the model's own): hidden states [T, E] of two decoders' tokens, each after an input of its own. Ours are
    computed in one row, `first` tokens of each in a first step, over blocks of `block_size`."""
    encoder = model.encoder
    assert encoder is not None
    encoded = _encoded(encoder, generator)
    prompts = [torch.from_numpy(ids).to(encoded[0].device) for ids in token_ids]
    return _paged(model, encoder, prompts, encoded, first, block_size), _alone(model, prompts, encoded)


def _encoded(encoder: HFEncoder, generator: torch.Generator) -> list[torch.Tensor]:
    """The encoder's output [P, E] for an input of each sequence."""
    outputs = []
    for length in INPUT_LENGTHS:
        num_positions = min(length, encoder.facts.max_positions)
        outputs.append(encoder.encode(encoder_input(num_positions, encoder.made_up(num_positions, generator))))
    return outputs


def _alone(model: HFModel, prompts: list[torch.Tensor], encoded: list[torch.Tensor]) -> torch.Tensor:
    """Hidden states [T, E], by the model's own attention and masks."""
    config: Any = model.decoder.config  # one for all modules; `set_attn_implementation` refuses some classes
    config._attn_implementation = "eager"
    try:
        hidden = [
            model.decoder(
                input_ids=prompt[None], encoder_hidden_states=output[None], use_cache=False
            ).last_hidden_state[0]
            for prompt, output in zip(prompts, encoded, strict=True)
        ]
    finally:
        config._attn_implementation = NAME
    return torch.cat(hidden)


def _paged(
    model: HFModel,
    encoder: HFEncoder,
    prompts: list[torch.Tensor],
    encoded: list[torch.Tensor],
    first: tuple[int, int],
    block_size: int,
) -> torch.Tensor:
    """Hidden states [T, E], by our attention over a small pool, in two steps."""
    config, device = model.config, encoded[0].device
    layers = make_layers(config.layers, "auto", sinks_of(model.decoder, config.layers))
    cross_tables = _tables_of(encoded, TABLES.size, block_size)
    num_blocks = TABLES.size + cross_tables.size
    shape = (num_blocks, config.num_kv_heads, config.num_layers, 2, block_size, config.head_dim)
    pool = torch.zeros(shape, dtype=encoded[0].dtype, device=device)
    bind_kv_cache(layers, pool)
    bind_kv_cache(model.cross_layers, pool)
    builder = metadata_backend([*layers.values(), *model.cross_layers.values()]).get_builder_cls()()
    lengths = [len(output) for output in encoded]
    for table, output in zip(cross_tables, encoded, strict=True):
        written = slots_of(table, 0, len(output), block_size)
        encoder.store(output, builder.build([len(output)], [len(output)], table[None], written, device))
    parts: list[list[torch.Tensor]] = [[], []]
    for starts, ends in (((0, 0), first), (first, tuple(map(len, prompts)))):
        runs = list(zip(starts, ends, strict=True))
        slots = [slots_of(table, at, end - at, block_size) for table, (at, end) in zip(TABLES, runs, strict=True)]
        metadata = builder.build(
            [end - at for at, end in runs],
            ends,
            TABLES,
            np.concatenate(slots),
            device,
            encoder_seq_lens=lengths,
            cross_block_tables=cross_tables,
        )
        tokens = torch.cat([prompt[at:end] for prompt, (at, end) in zip(prompts, runs, strict=True)])
        positions = torch.cat([torch.arange(at, end, device=device) for at, end in runs])
        with set_forward_context(ForwardContext(metadata, layers)):
            hidden = model(tokens, positions)
        for part, rows in zip(parts, hidden.split([end - at for at, end in runs]), strict=True):
            part.append(rows)
    return torch.cat([torch.cat(part) for part in parts])


def _tables_of(encoded: list[torch.Tensor], first_block: int, block_size: int) -> np.ndarray:
    """Block tables of the encoder's outputs, int32 [sequences, blocks], their blocks taking turns."""
    width = -(-max(len(output) for output in encoded) // block_size)
    return first_block + np.arange(width * len(encoded), dtype=np.int32).reshape(width, len(encoded)).T.copy()
