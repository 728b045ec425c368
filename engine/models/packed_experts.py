"""GPT-OSS's experts as its checkpoints store them, in MXFP4 (e2m1 in groups of 32 inputs that share a power of two).

X experts, N outputs, K inputs, G = K / 32 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.engine.models.dummy_weights import fill_with_noise
from tandem.engine.models.weights import PLAIN_DTYPES, StoredTensor
from tandem.kernels.experts.stacked import MX_GROUP, StackedWeight, stacked_mxfp4

Stacks = tuple[StackedWeight, StackedWeight]  # of gate and up, gate's outputs first; of down
MATRICES = ("gate_up_proj", "down_proj")
METHOD = "mxfp4"
DUMMY_EXPONENT = 120  # 2^-7: with any e2m1 it keeps activations' size at some 3,000 inputs


def are_packed(folder: Path) -> bool:
    """Whether config.json says that the folder's model is GPT-OSS with experts in MXFP4."""
    raw = read_json_object(folder / "config.json") or {}
    given = raw.get("quantization_config")
    return raw.get("model_type") == "gpt_oss" and isinstance(given, dict) and given.get("quant_method") == METHOD


def read_tensor(stored: Mapping[str, StoredTensor], name: str) -> torch.Tensor:
    """A tensor of the checkpoint. Raises CheckpointError."""
    if name not in stored:
        raise CheckpointError(f"no shard holds {name}; fetch the model again")
    path = stored[name].path
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"can't read {path}: {error}; the file is torn, fetch it again") from error


def names_of(experts: str) -> list[str]:
    """What a checkpoint has in place of the parameters of the module `experts`."""
    return [f"{experts}.{matrix}_{part}" for matrix in MATRICES for part in ("blocks", "scales", "bias")]


def read_experts(
    stored: Mapping[str, StoredTensor],
    experts: str,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device,
) -> Stacks:
    """The matrices of the module `experts`, biases in `dtype`. `shapes`: [X, K, N] of the parameters that they stand
    for. Raises CheckpointError."""
    for matrix in MATRICES:
        (num_experts, num_inputs, num_outputs), name = shapes[matrix], f"{experts}.{matrix}"
        groups = num_inputs // MX_GROUP
        _check(stored, f"{name}_blocks", (num_experts, num_outputs, groups, MX_GROUP // 2), ("U8",))
        _check(stored, f"{name}_scales", (num_experts, num_outputs, groups), ("U8",))
        _check(stored, f"{name}_bias", (num_experts, num_outputs), PLAIN_DTYPES)
    gate_up, down = (_read(stored, f"{experts}.{matrix}", dtype, device) for matrix in MATRICES)
    return gate_up, down


def made_up_experts(experts: str, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> Stacks:
    """Matrices for `--load-format dummy`."""
    made = []
    for matrix in MATRICES:
        num_experts, num_inputs, num_outputs = shapes[matrix]
        noise = torch.empty((num_experts, num_outputs, num_inputs), dtype=dtype, device=device)
        fill_with_noise(f"{experts}.{matrix}", noise)
        codes = (noise * (8 / noise.abs().amax()) + 8).clamp_(0, 15).to(torch.uint8)
        exponents = torch.full_like(codes[:, :, ::MX_GROUP], DUMMY_EXPONENT)
        made.append(stacked_mxfp4(codes, exponents, torch.zeros(num_experts, num_outputs, dtype=dtype, device=device)))
    return made[0], made[1]


def _read(stored: Mapping[str, StoredTensor], name: str, dtype: torch.dtype, device: torch.device) -> StackedWeight:
    blocks, exponents, bias = (
        read_tensor(stored, f"{name}_{part}").to(device) for part in ("blocks", "scales", "bias")
    )
    codes_XNK = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)  # the lower half of a byte comes first
    if name.endswith(MATRICES[0]):  # gate's and up's outputs take turns
        order = torch.arange(codes_XNK.shape[1], device=device).view(-1, 2).t().flatten()
        codes_XNK, exponents, bias = codes_XNK[:, order], exponents[:, order], bias[:, order]
    try:
        return stacked_mxfp4(codes_XNK, exponents, bias.to(dtype).contiguous())
    except ValueError as error:
        raise CheckpointError(f"{name}_scales: {error}; use a checkpoint in bf16") from error


def _check(stored: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if name not in stored:
        raise CheckpointError(f"no shard holds {name}; fetch the model again")
    found = stored[name]
    if found.shape != shape or found.dtype not in dtypes:
        raise CheckpointError(
            f"{found.path}: {name} is {found.dtype} {list(found.shape)}, config.json asks for {dtypes[0]} "
            f"{list(shape)}; config and weights don't belong together"
        )
