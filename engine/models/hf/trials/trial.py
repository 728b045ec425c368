"""The trial that a model of transformers stands before it serves: our paged attention against the model's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.media.encoder import EncodeError
from tandem.engine.media.slots import MediaSlots
from tandem.engine.models.hf.attention import NAME
from tandem.engine.models.hf.layers import make_layers, sinks_of
from tandem.engine.models.hf.model import HFModel
from tandem.engine.models.hf.towers import TowerEncoder
from tandem.engine.models.hf.trials.encoder_trial import encoded_states
from tandem.engine.models.hf.trials.routes import Routes
from tandem.engine.running.step_inputs import ForwardInputs
from tandem.engine.scheduling.step import NewSlot, ScheduledRow
from tandem.kernels.api.attention import bind_kv_cache, metadata_backend
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadataBuilder

LENGTHS = (37, 9)  # tokens of the two sequences, computed together; spans of items come on top
FIRST = (21, 4)  # of which so many in a first step
BEFORE = 18  # tokens of the first sequence before its item, which the first step ends in
BLOCK = 16  # tokens, so that both sequences fill some and end inside one
# Of the tokens: in 16 bits some may go to other experts by a rounding where these aren't computed by our function; a
# guess.
JUDGED = 0.75
# Largest error of those tokens' hidden states, over their lengths: docs/measurements.md#models-of-transformers.
LARGEST_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.15, torch.float16: 0.02}


@dataclass(frozen=True)
class _Prompt:
    token_ids: np.ndarray  # int64, as the model itself knows them
    item: MediaItem | None = None


@torch.inference_mode()
def check_against_own_attention(model: HFModel, device: torch.device, dtype: torch.dtype) -> None:
    """Computes two sequences in one row, in two steps over scattered blocks, and each one alone by transformers' eager
    attention, by the same experts. The first has an item in it, if the model takes any. Raises CheckpointError when
    they differ: then the model does something that we don't know of."""
    generator = torch.Generator().manual_seed(7)
    embedding: Any = model.decoder.get_input_embeddings()
    most = min(model.vocab_size, int(embedding.num_embeddings))
    prompts = [_Prompt(torch.randint(0, most, (length,), generator=generator).numpy()) for length in LENGTHS]
    try:
        if model.media_encoder is not None:
            prompts[0] = _with_item(model, prompts[0].token_ids)
        if model.encoder is not None:
            ours, own = encoded_states(model, [each.token_ids for each in prompts], FIRST, BLOCK, generator)
        else:
            routes = Routes()
            with routes.noting():
                own = _alone(model, prompts, device)
            ours = _paged(model, prompts, device, dtype, routes)
    except EncodeError as failed:
        raise CheckpointError(f"{model.config.architecture} can't be served: {failed}") from failed
    error_T = ((ours - own).float().norm(dim=-1) / own.float().norm(dim=-1).clamp_min(1e-9)).nan_to_num(float("inf"))
    error = float(error_T.quantile(JUDGED))
    if not error <= LARGEST_ERROR[dtype]:
        raise CheckpointError(
            f"{model.config.architecture} can't be served: over paged attention its hidden states differ from those of "
            f"its own attention by {error:.1%}; please report the model"
        )


def _with_item(model: HFModel, token_ids: np.ndarray) -> _Prompt:
    encoder = model.media_encoder
    assert isinstance(encoder, TowerEncoder)
    arrays = encoder.tower.example(model.head.config)
    own_ids = arrays["input_ids"][0]
    token_ids = token_ids.copy()
    token_ids[token_ids == own_ids[0]] = (own_ids[0] + 1) % model.vocab_size
    item = MediaItem.of(BEFORE, len(own_ids), encoder.tower.kind, arrays)
    return _Prompt(np.concatenate((token_ids[:BEFORE], own_ids, token_ids[BEFORE:])), item)


def _alone(model: HFModel, prompts: list[_Prompt], device: torch.device) -> torch.Tensor:
    """Hidden states [T, E], by the model's own attention and masks."""
    config: Any = model.decoder.config  # one for all modules; `set_attn_implementation` refuses some classes
    config._attn_implementation = "eager"
    hidden = []
    try:
        for prompt in prompts:
            input_ids = torch.from_numpy(prompt.token_ids)[None].to(device)
            if prompt.item is not None:
                hidden.append(_whole(model, prompt.item, input_ids))
                continue
            position_ids = torch.arange(input_ids.shape[1], device=device)[None]
            output = model.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False)
            hidden.append(output.last_hidden_state[0])
    finally:
        config._attn_implementation = NAME
    return torch.cat(hidden)


def _whole(model: HFModel, item: MediaItem, input_ids: torch.Tensor) -> torch.Tensor:
    """Hidden states [T, E] of a prompt with an item, by the model's own class as a whole."""
    assert isinstance(model.media_encoder, TowerEncoder)
    arguments = model.media_encoder.arguments(item.arrays())
    for name, value in arguments.items():
        if value.shape == (1, item.length):  # one for each token
            arguments[name] = torch.zeros_like(input_ids)
            arguments[name][:, item.start : item.end] = value
    arguments["input_ids"] = input_ids
    with model.whole() as causal:
        base: Any = causal.base_model
        hidden: torch.Tensor = base(**arguments, use_cache=False).last_hidden_state[0]
    return hidden


def _paged(
    model: HFModel, prompts: list[_Prompt], device: torch.device, dtype: torch.dtype, routes: Routes
) -> torch.Tensor:
    """Hidden states [T, E], by our attention over a small pool, in two steps. `routes`: of the prompts' tokens, one
    prompt behind the other."""
    needs = model.needs
    layers = make_layers(needs, "auto", sinks_of(model.decoder, needs))
    lengths = tuple(len(prompt.token_ids) for prompt in prompts)
    num_blocks = -(-max(lengths) // BLOCK)
    tables = np.array([np.arange(num_blocks) * 2 + 1, np.arange(num_blocks)[::-1] * 2], np.int32)
    shape = (2 * num_blocks, needs[0].num_kv_heads, len(needs), 2, BLOCK, needs[0].head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    bind_kv_cache(layers, pool)
    builder = metadata_backend(layers.values()).get_builder_cls()()
    media = _slots(model, prompts, device)
    first_token = (0, lengths[0])
    parts: list[list[torch.Tensor]] = [[], []]
    for starts, ends in (((0, 0), FIRST), (FIRST, lengths)):
        rows = [ScheduledRow(slot, at, end - at) for slot, (at, end) in enumerate(zip(starts, ends, strict=True))]
        inputs = _inputs(prompts, rows, tables, builder, device)
        places = [torch.arange(row.start, row.start + row.num_tokens) + first_token[row.slot] for row in rows]
        repeating = routes.repeating(torch.cat(places).to(device))
        with repeating, set_forward_context(ForwardContext(inputs.metadata, layers)):
            found = None if media is None else media.of(rows, inputs.first_token_R, inputs.positions_T)
            hidden = model(inputs.input_ids_T, inputs.positions_T, None, found)
        for part, its_rows in zip(parts, hidden.split([row.num_tokens for row in rows]), strict=True):
            part.append(its_rows)
    return torch.cat([torch.cat(part) for part in parts])


def _slots(model: HFModel, prompts: list[_Prompt], device: torch.device) -> MediaSlots | None:
    if model.media_encoder is None:
        return None
    slots = MediaSlots(model.media_encoder, len(prompts), 0, device)
    for slot, prompt in enumerate(prompts):
        media = () if prompt.item is None else (prompt.item,)
        ids, sampling = prompt.token_ids, SamplingParams(max_tokens=1)
        slots.apply([NewSlot(slot, ids, len(ids), (), sampling, 0, media)])
    return slots


def _inputs(
    prompts: list[_Prompt],
    rows: list[ScheduledRow],
    tables: np.ndarray,
    builder: AttentionMetadataBuilder,
    device: torch.device,
) -> ForwardInputs:
    positions = [np.arange(row.start, row.start + row.num_tokens) for row in rows]
    slots = [table[at // BLOCK] * BLOCK + at % BLOCK for table, at in zip(tables, positions, strict=True)]
    lengths = np.array([row.num_tokens for row in rows], np.int64)
    metadata = builder.build(
        lengths,
        np.array([row.start + row.num_tokens for row in rows], np.int64),
        torch.from_numpy(tables).to(device),
        torch.from_numpy(np.concatenate(slots).astype(np.int64)).to(device),
        device,
    )
    tokens = np.concatenate([prompt.token_ids[at] for prompt, at in zip(prompts, positions, strict=True)])
    return ForwardInputs(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        metadata,
        np.cumsum(lengths) - lengths,
        np.arange(len(rows)),
    )
