"""A head whose layer transformers has loaded with the model: the rest of it, from the checkpoint or made up."""

from __future__ import annotations

from pathlib import Path

import torch

from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.heads.hf_mtp import HFMtpHead
from tandem.engine.models.heads.mtp_config import MATRICES, in_checkpoint, layer_prefix, names_in_layer
from tandem.engine.models.heads.mtp_ends import MtpEnds
from tandem.engine.models.hf.model import HFModel
from tandem.engine.models.loader import read_tensors
from tandem.engine.models.weights import check_weights


def load_hf_mtp_head(
    folder: Path, model: HFModel, num_speculative_tokens: int, load_format: str, attention_backend: str = "auto"
) -> HFMtpHead:
    """The head on the model's device, in its dtype. `model` was loaded with its `mtp_layer`. Raises CheckpointError for
    missing, misshapen or torn tensors."""
    embedding_VE, output_VE, size = model.embedding_VE, model.whole_output(), model.config.hidden_size
    eps = float(model.decoder.config.rms_norm_eps)
    ends = MtpEnds(size, eps, embedding_VE, output_VE, embedding_VE.dtype, embedding_VE.device)
    if load_format == "dummy":
        for name, parameter in ends.named_parameters():
            fill_with_noise(f"mtp.{name}", parameter.data)
    else:
        _fill(ends, folder, layer_prefix(model.config.num_layers))
    return HFMtpHead(model, ends, num_speculative_tokens, attention_backend).eval()


def _fill(ends: MtpEnds, folder: Path, prefix: str) -> None:
    targets = {in_checkpoint(name, prefix): parameter.data for name, parameter in ends.named_parameters()}
    needed = {name: tuple(target.shape) for name, target in targets.items()}
    there, matrices = names_in_layer(folder, prefix), [f"{prefix}{name}" for name in MATRICES]
    needed |= {name: tuple(ends.embedding_VE.shape) for name in matrices if name in there}
    own: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(check_weights(folder, needed, False, reads=needed.__contains__)):
        if name in targets:
            targets[name].copy_(tensor)
        else:
            own[name] = tensor
    ends.take_own(*(own.get(name) for name in matrices))
