"""What a checkpoint says of the layer behind its model's last that guesses tokens (multi-token prediction). No torch.

Named and computed as checkpoints of DeepSeek-V3 (arXiv 2412.19437), GLM-4.5 and Xiaomi's MiMo have it, and vLLM reads
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.engine.contracts.model_config import ModelConfig
from tandem.engine.contracts.weights.quantisation import MADE
from tandem.engine.models.weights import stored_tensors

# What a checkpoint calls modules of a head, where that isn't what we do.
DEEPSEEK_NAMES = {"norm": "shared_head.norm"}
MIMO_NAMES = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "norm": "final_layernorm",
}
# A head's own embedding and output matrix, which checkpoints hold or leave out: published ones are the model's again.
MATRICES = ("embed_tokens.weight", "shared_head.head.weight")
# Of a model that transformers' modules run, what its checkpoint holds of a head beside a decoder layer.
HF_ENDS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", *MATRICES)
HF_FAMILIES = ("glm4_moe",)
NOT_BUILT = (
    "--speculative-config: mtp is built for deepseek_v3 and mimo, and for glm4_moe by transformers' modules; this is "
    "{}: choose another method"
)


class MtpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A head of one layer like the served model's last. `prefix`: of its tensors' names in the checkpoint.
    `hidden_first`: the feature stands before the embedding where both are projected. `carries_normed`: what stands for
    the next feature has passed the last norm."""

    layer: ModelConfig
    prefix: str
    hidden_first: bool
    carries_normed: bool

    def stored_name(self, name: str) -> str:
        """The checkpoint's name of a tensor that is called `name` in a model with the head's modules and layers."""
        own = name.removeprefix("model.").removeprefix(f"layers.{self.layer.num_layers}.").removeprefix("ends.")
        return in_checkpoint(own, self.prefix, MIMO_NAMES if self.layer.architecture == "mimo" else DEEPSEEK_NAMES)


def in_checkpoint(name: str, prefix: str, names: Mapping[str, str] = DEEPSEEK_NAMES) -> str:
    """The checkpoint's name of a head's own tensor. `names`: what it calls modules otherwise than we do."""
    module, _, kind = name.rpartition(".")
    return f"{prefix}{names.get(module, module)}.{kind}"


def layer_prefix(layer: int) -> str:
    """How names of a layer's tensors begin in checkpoints."""
    return f"model.layers.{layer}."


def mtp_prefix(config: ModelConfig) -> str | None:
    """How names of the tensors begin that only a head reads; None: checkpoints of this family hold none."""
    if config.architecture == "mimo":
        return "model.mtp_layers."
    return None if config.latents is None else layer_prefix(config.num_layers)


def load_mtp_config(folder: Path, served: ModelConfig) -> MtpConfig:
    """The head in the folder of the served model. Raises ConfigError where there is none, or none that is computed."""
    known = {"deepseek_v3": layer_prefix(served.num_layers), "mimo": "model.mtp_layers.0."}
    if served.architecture not in known:
        raise ConfigError(NOT_BUILT.format(served.architecture))
    _check_count(folder)
    _check_layer(served)
    is_mimo = served.architecture == "mimo"
    if served.sliding_window is not None:  # not in its first layer, whose like the head is in MiMo's own code
        served = msgspec.structs.replace(served, sliding_window=None, sliding_layers=())
    # What is made smaller when it is loaded is the model: of its layers this one is left as it is stored.
    made = served.quantisation is not None and served.quantisation.stored == MADE
    return MtpConfig(
        layer=msgspec.structs.replace(served, quantisation=None) if made else served,
        prefix=known[served.architecture],
        hidden_first=is_mimo,
        carries_normed=is_mimo,
    )


def check_hf_mtp(folder: Path, architecture: str, num_layers: int, load_format: str) -> None:
    """Raises ConfigError where a model of transformers has no such head, or none that is computed, CheckpointError
    where its folder lacks it."""
    if architecture not in HF_FAMILIES:
        raise ConfigError(NOT_BUILT.format(f"{architecture} by transformers' modules"))
    _check_count(folder)
    if load_format != "dummy":
        names_in_layer(folder, layer_prefix(num_layers))


def num_mtp_layers(folder: Path) -> int:
    """How many layers that guess config.json speaks of. Raises CheckpointError."""
    path = folder / "config.json"
    count = (read_json_object(path) or {}).get("num_nextn_predict_layers") or 0
    if not isinstance(count, int):
        raise CheckpointError(
            f"{path}: num_nextn_predict_layers is {count!r}; repair the file or fetch the model again"
        )
    return count


def names_in_layer(folder: Path, prefix: str) -> list[str]:
    """The names of a head's tensors. Raises CheckpointError where there are none."""
    names = [name for name in stored_tensors(folder) if name.startswith(prefix)]
    if not names:
        raise CheckpointError(
            f"{folder}: no shard holds {prefix}*, the layer that guesses: who made this checkpoint left it out. "
            "Fetch one that has it, or choose another method of --speculative-config"
        )
    return names


def _check_count(folder: Path) -> None:
    count = num_mtp_layers(folder)
    if count != 1:
        what = f"{count} layers that guess, of which each does one place; those of one layer are built"
        path = folder / "config.json"
        raise ConfigError(
            f"--speculative-config: num_nextn_predict_layers of {path} is {count}: the checkpoint has "
            f"{what if count else 'no layer that guesses'}; choose another method"
        )


def _check_layer(served: ModelConfig) -> None:
    how = served.quantisation
    if served.window_of(0) is not None or served.blocksparse is not None:
        what = "a sliding window in the first layer" if served.blocksparse is None else "blocksparse_params"
        raise ConfigError(f"--speculative-config: mtp doesn't go with {what}: choose another method")
    if how is not None and how.stored != MADE and served.architecture == "mimo":
        raise ConfigError(
            f"--speculative-config: mtp is not built for MiMo quantised by {how.method}: take the checkpoint of 16 "
            "bits, with --quantization fp8 where memory is short"
        )
