"""The choice of whose modules compute a model: our own, or those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import torch

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.engine.contracts.model_config import ModelConfig, is_native, load_model_config
from tandem.engine.contracts.weights.quantisation import made_fp8
from tandem.engine.models.loader import load_model
from tandem.engine.models.weights import TORCH_NAMES, stored_tensors
from tandem.engine.parallel.expert_group import ExpertGroup
from tandem.engine.parallel.group import TensorParallel
from tandem.engine.parallel.sharding import Shard

if TYPE_CHECKING:
    from tandem.engine.models.decoder import DecoderModel
    from tandem.engine.models.hf.config import HFConfig
    from tandem.engine.models.hf.model import HFModel

Config = TypeVar("Config", ModelConfig, "HFConfig")


def takes_transformers(folder: Path, options: ModelOptions) -> bool:
    """Whether transformers' modules compute this model. Raises ConfigError when they would but aren't installed."""
    if options.model_impl == "tandem" or (options.model_impl == "auto" and is_native(folder)):
        return False
    if find_spec("transformers") is None:
        raise ConfigError(f"{folder} needs transformers to run: pip install 'transformers>=5.17'")
    return True


def load_config(folder: Path, options: ModelOptions) -> ModelConfig | HFConfig:
    """The configuration of the model in `folder`. Raises CheckpointError for a model that neither can serve."""
    if not takes_transformers(folder, options):
        return _with_quantisation(load_model_config(folder), options.quantization)
    from tandem.engine.models.hf.config import load_hf_config  # importing this takes seconds

    config = load_hf_config(folder)
    if options.quantization != "auto" and config.encoder is not None:
        raise ConfigError(f"--quantization {options.quantization}: not for models with an encoder")
    return _with_quantisation(config, options.quantization)


def dtype_of_weights(folder: Path, config: ModelConfig | HFConfig, options: ModelOptions) -> str:
    """The type that config.json names or, where it names none, as GPT-OSS's, the one in which most of the numbers that
    aren't quantised are stored. Raises CheckpointError."""
    raw = read_json_object(folder / "config.json") or {}
    text = raw.get("text_config")
    parts = [raw, text] if isinstance(text, dict) else [raw]
    if options.load_format == "dummy" or any(part.get(name) for part in parts for name in ("dtype", "torch_dtype")):
        return config.dtype
    numbers = dict.fromkeys(TORCH_NAMES, 0)
    for tensor in stored_tensors(folder).values():
        if tensor.dtype in numbers:
            numbers[tensor.dtype] += math.prod(tensor.shape)
    return TORCH_NAMES[max(numbers, key=lambda dtype: numbers[dtype])] if any(numbers.values()) else config.dtype


def _with_quantisation(config: Config, asked: str) -> Config:
    """Raises ConfigError where the checkpoint is not what the option says."""
    found = config.quantisation
    if asked == "auto" or (found is not None and asked == found.method):
        return config
    if asked == "fp8" and found is None:
        return msgspec.structs.replace(config, quantisation=made_fp8())
    what = "not quantised" if found is None else f"of {found.method}"
    raise ConfigError(f"--quantization {asked}: the checkpoint is {what}; leave the option out")


def load_chosen(
    folder: Path,
    config: ModelConfig | HFConfig,
    options: ModelOptions,
    device: torch.device,
    dtype: torch.dtype,
    attention_backend: str = "auto",
    group: TensorParallel | None = None,
    on_loaded: Callable[[float], None] | None = None,
    expert_group: ExpertGroup | None = None,
    reads_mtp: bool = False,
) -> DecoderModel | HFModel:
    """The model, as `load_model` or `load_hf_model` makes it. `reads_mtp`: a head will take the layer behind its last.
    Raises CheckpointError, ConfigError."""
    if isinstance(config, ModelConfig):
        return load_model(folder, config, options, device, dtype, attention_backend, group, on_loaded, expert_group)
    from tandem.engine.models.hf.loading.loader import load_hf_model

    parts = folder, config, options, device, dtype, attention_backend
    return load_hf_model(*parts, group, on_loaded, expert_group, reads_mtp)


def check_shares(folder: Path, options: ModelOptions, shard: Shard) -> int:
    """How many KV heads the model has. Raises ConfigError unless ranks like this one can share it out."""
    config, size = load_config(folder, options), shard.size
    if isinstance(config, ModelConfig):
        own, how = shard.config(config), config.quantisation
        mixture = own.mixture
        of_experts = () if mixture is None else (mixture.width, mixture.shared_width)
        others = () if how is None or how.has_plain_layers else (own.attended_size, own.intermediate_size)
        for inputs in (*others, *of_experts):
            if how is not None and size > 1 and inputs % how.least_inputs:
                raise ConfigError(
                    f"--tensor-parallel-size {size}: {inputs} inputs of a quantised layer on each rank are no whole "
                    f"groups of {how.least_inputs}; take fewer ranks"
                )
    else:
        from tandem.engine.models.hf.config import read_config
        from tandem.engine.models.hf.parallel import check_plan

        if config.quantisation is not None and size > 1:
            raise ConfigError(
                f"--tensor-parallel-size {size}: quantised models that run by transformers' modules aren't shared out; "
                "leave it out"
            )
        check_plan(read_config(folder), config.layers, shard)
    return config.num_kv_heads
