"""An EAGLE-3 head from its checkpoint, or with made-up weights for benchmarks."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.heads.eagle3 import EagleHead
from tandem.engine.models.quantised_layers import part_rows
from tandem.engine.models.weights import PICKLED, PLAIN_DTYPES, StoredTensor, how_to_convert, stored_tensors
from tandem.engine.parallel.sharding import Cut

# Whose names stand at the top of a checkpoint; all others are the layer's.
TOP = ("fc", "norm", "lm_head")
# The token of draft token w is w + d2t[w]; t2d says the same the other way round. Embeddings are the served model's.
OFFSETS, PASSED_OVER = "d2t", ("t2d", "embed_tokens.weight", "model.embed_tokens.weight")


def fill_head(head: EagleHead, whole: EagleHead, folder: Path, load_format: str) -> EagleHead:
    """The head with its weights, in a group this rank's share; `whole`: all of it, on the meta device. Raises
    CheckpointError for missing, unknown, misshapen or torn tensors."""
    if load_format == "dummy":
        for name, parameter in head.named_parameters():
            fill_with_noise(f"eagle3.{name}", parameter.data)
        head.token_W.mul_(head.config.layer.vocab_size // head.config.draft_vocab_size)
    else:
        _fill(head, whole, folder)
    head.mlp.group()
    return head.eval()


def _fill(head: EagleHead, whole: EagleHead, folder: Path) -> None:
    if not any(folder.glob("*.safetensors")) and not any(folder.glob(PICKLED)):  # as of a name on the Hub
        raise CheckpointError(
            f"{folder} has no safetensors. Of a head that is published as pytorch_model.bin fetch that by `hf download "
            f"NAME --local-dir DIR`, give DIR, and {how_to_convert(Path('DIR'))}"
        )
    targets = _targets(head)
    stored = {_plain(name): (name, one) for name, one in stored_tensors(folder).items()}
    stored = {name: found for name, found in stored.items() if name not in PASSED_OVER}
    offsets = stored.pop(OFFSETS, None)
    _check(folder, _targets(whole), {name: one for name, (_, one) in stored.items()})
    for name, (full, one) in stored.items():
        tensor, cut = _read(full, one), _cut(head, name)
        head.shard.fill(name, targets[name], tensor if cut is None else cut.of(tensor))
    config = head.config
    if offsets is None and config.draft_vocab_size != config.layer.vocab_size:
        raise CheckpointError(f"{folder}: no shard holds {OFFSETS}, which says its tokens; fetch the head again")
    if offsets is None:
        return
    offset_W = _read(*offsets)
    if offset_W.shape != head.token_W.shape or offset_W.is_floating_point():
        raise CheckpointError(f"{folder}: {OFFSETS} is {list(offset_W.shape)}, of {config.draft_vocab_size} tokens")
    token_W = torch.arange(config.draft_vocab_size) + offset_W.long()
    if int(token_W.min()) < 0 or int(token_W.max()) >= config.layer.vocab_size:
        raise CheckpointError(f"{folder}: {OFFSETS} names tokens beyond the {config.layer.vocab_size} that there are")
    head.token_W.copy_(token_W)


def _plain(name: str) -> str:
    """Its name as SafeAILab writes it; others write `layers.0` for the layer, and `model.` before all."""
    return name.removeprefix("model.").replace("layers.0.", "midlayer.", 1)


def _targets(head: EagleHead) -> dict[str, torch.Tensor]:
    """Name in the checkpoint -> the part of a parameter that it fills."""
    targets: dict[str, torch.Tensor] = {}
    for name, parameter in head.named_parameters():
        first = name.partition(".")[0]
        inner = "self_attn." if first in ("qkv_proj", "o_proj") else ""
        full = name if first in TOP else f"midlayer.{inner}{name}"
        for part, (start, stop) in part_rows(full, len(parameter), head.shard.config(head.config.layer)).items():
            targets[part.removeprefix("model.")] = parameter.data[start:stop]
    return targets


def _cut(head: EagleHead, name: str) -> Cut | None:
    """What this rank takes of the layer's tensor `name`; None: all of it."""
    return None if name.startswith(TOP) else head.shard.cut(name, head.config.layer)


def _check(folder: Path, targets: dict[str, torch.Tensor], stored: dict[str, StoredTensor]) -> None:
    for name, one in stored.items():
        if name not in targets:
            raise CheckpointError(f"{one.path} holds {name}, which an EAGLE-3 head of this config.json does not have")
        if one.shape != tuple(targets[name].shape) or one.dtype not in PLAIN_DTYPES:
            raise CheckpointError(
                f"{one.path}: {name} is {one.dtype} {list(one.shape)}, config.json asks for "
                f"{list(targets[name].shape)} of 16 or 32 bits; config and weights don't belong together"
            )
    if missing := [name for name in targets if name not in stored]:
        raise CheckpointError(f"{folder}: no shard holds {missing[0]}; fetch the head again")


def _read(name: str, one: StoredTensor) -> torch.Tensor:
    try:
        with safe_open(one.path, framework="pt", device="cpu") as shard:
            tensor: torch.Tensor = shard.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"can't read {one.path}: {error}; the file is torn, fetch it again") from error
