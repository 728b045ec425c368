"""A head for multi-token prediction from its model's checkpoint, or with made-up weights for benchmarks."""

from __future__ import annotations

from pathlib import Path

from tandem.engine.models import quantised_layers
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.heads.mtp import MtpHead
from tandem.engine.models.heads.mtp_config import MATRICES, MtpConfig, names_in_layer
from tandem.engine.models.loader import read_tensors, targets_of
from tandem.engine.models.weights import StoredTensor, check_weights


def load_mtp_head(
    folder: Path,
    config: MtpConfig,
    model: DecoderModel,
    num_speculative_tokens: int,
    load_format: str,
    attention_backend: str = "auto",
) -> MtpHead:
    """The head on the model's device, in its dtype. Raises CheckpointError for missing, unknown, misshapen or torn
    tensors, ConfigError for sizes that can't be quantised."""
    device, dtype = model.embed_tokens.weight.device, model.embed_tokens.weight.dtype
    whole = MtpHead(config, model, num_speculative_tokens, "meta", attention_backend)
    if load_format == "dummy":
        head = MtpHead(config, model, num_speculative_tokens, device, attention_backend)
        for name, parameter in head.named_parameters():
            fill_with_noise(f"mtp.{name}", parameter.data)
        quantised_layers.fill_with_noise(head, whole, dtype, device)
        head.finish_loading()
        return head.eval()
    matrices = [f"{config.prefix}{name}" for name in MATRICES]
    stored = _checked(folder, config, whole, matrices)
    scales = quantised_layers.scale_dtype(stored)
    head = MtpHead(config, model, num_speculative_tokens, device, attention_backend, scales)
    own_parts = targets_of(head, head.shard.config(config.layer))
    targets = {config.stored_name(name): target for name, target in own_parts.items()}
    cuts = {config.stored_name(name): head.shard.cut(name, config.layer) for name in own_parts}
    for name, tensor in read_tensors({name: stored[name] for name in targets}, cuts):
        head.shard.fill(name, targets[name], tensor)
    quantised_layers.fill(head, stored, device, lambda: None)
    own = dict(read_tensors({name: stored[name] for name in matrices if name in stored}))
    head.ends.take_own(*(own.get(name) for name in matrices))
    head.finish_loading()
    return head.eval()


def _checked(folder: Path, config: MtpConfig, whole: MtpHead, matrices: list[str]) -> dict[str, StoredTensor]:
    """The checkpoint's tensors of the head, once they are those that it needs."""
    there = names_in_layer(folder, config.prefix)
    needed = {config.stored_name(name): tuple(part.shape) for name, part in targets_of(whole, config.layer).items()}
    matrix = (config.layer.vocab_size, config.layer.hidden_size)
    needed |= {name: matrix for name in matrices if name in there}
    quantised = quantised_layers.needed_of(whole)
    return check_weights(folder, needed, False, quantised, lambda name: name.startswith(config.prefix))
