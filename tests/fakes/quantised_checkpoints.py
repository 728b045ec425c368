"""Tiny checkpoints in the formats in which quantised weights are published, each with its plain twin: a folder whose
weights are, in fp32, exactly what the quantised one says. Packing is written here once more, number by number."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds the output of this place
FP8 = torch.float8_e4m3fn
LEFT_OUT = (".gate", ".eh_proj", ".embed_tokens", ".shared_head.head")  # as DeepSeek publishes V3
GROUP = 32


def fp8_blocks(weight: torch.Tensor, size: tuple[int, int] = (32, 32)) -> tuple[Tensors, torch.Tensor]:
    values, twin = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // size[0]), -(-weight.shape[1] // size[1]))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = (slice(row * size[0], (row + 1) * size[0]), slice(column * size[1], (column + 1) * size[1]))
            scales[row, column] = weight[place].abs().max() / 448
            values[place] = (weight[place] / scales[row, column]).to(FP8)
            twin[place] = values[place].float() * scales[row, column]
    return {"weight": values, "weight_scale_inv": scales}, twin


def fp8_wide_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return fp8_blocks(weight, (128, 128))


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    return {"weight": values, "weight_scale": scale[None], "input_scale": torch.ones(1)}, values.float() * scale


def fp8_channel(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    values = (weight / scale.float()).clamp(-448, 448).to(FP8)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def in_groups(
    weight: torch.Tensor, is_symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(stored 0 to 15 [N, K], zeros [N, G], scales fp16 [N, G], twin)."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(2), groups.amax(2)
    if is_symmetric:
        scales = (groups.abs().amax(2) / 7).half()
        zeros = torch.full(scales.shape, 8)
    else:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(1, 15).int()
    stored = (groups / scales.float()[:, :, None]).round().int() + zeros[:, :, None]
    stored = stored.clamp(0, 15)
    twin = (stored - zeros[:, :, None]).float() * scales.float()[:, :, None]
    return stored.view(weight.shape), zeros, scales, twin.view(weight.shape)


def nibbles(columns: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int [A, B] of 0 to 15 -> int32 [A, B / 8]."""
    words = torch.zeros(columns.shape[0], columns.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= columns[:, column::8].long() << (4 * place)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    stored, zeros, scales, twin = in_groups(weight, is_symmetric=False)
    return {
        "qweight": nibbles(stored.t(), AWQ_PLACES),
        "qzeros": nibbles(zeros.t(), AWQ_PLACES),
        "scales": scales.t().contiguous(),
    }, twin


def gptq(weight: torch.Tensor, is_symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    stored, zeros, scales, twin = in_groups(weight, is_symmetric)
    return {
        "qweight": nibbles(stored).t().contiguous(),
        "qzeros": nibbles(zeros.t() - 1),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(weight.shape[1]) // GROUP).int(),
    }, twin


def gptq_with_zeros(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return gptq(weight, is_symmetric=False)


def packed(weight: torch.Tensor, is_symmetric: bool = True) -> tuple[Tensors, torch.Tensor]:
    stored, zeros, scales, twin = in_groups(weight, is_symmetric)
    tensors = {"weight_packed": nibbles(stored), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not is_symmetric:
        tensors["weight_zero_point"] = nibbles(zeros.t()).t().contiguous()
    return tensors, twin


def packed_with_zeros(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    return packed(weight, is_symmetric=False)


def _compressed(weights: dict[str, Any], form: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"g": group}}


_FLOAT, _INT = (
    {"num_bits": 8, "type": "float"},
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP},
)
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}, fp8_blocks),
    "fp8_wide_blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_wide_blocks),
    "fp8_tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "compressed_tensor": (_compressed({**_FLOAT, "strategy": "tensor"}, "float-quantized"), fp8_tensor),
    "compressed_channel": (_compressed({**_FLOAT, "strategy": "channel"}, "float-quantized"), fp8_channel),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, fp8_channel),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "gptq": ({**_GPTQ, "sym": True}, gptq),
    "gptq_with_zeros": ({**_GPTQ, "sym": False}, gptq_with_zeros),
    "packed": (_compressed({**_INT, "symmetric": True}, "pack-quantized"), packed),
    "packed_with_zeros": (_compressed({**_INT, "symmetric": False}, "pack-quantized"), packed_with_zeros),
}


def quantised_folders(plain: Path, root: Path, form: str, kept: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """(quantised, twin) of the plain model, below `root`. `kept`: what isn't quantised begins so."""
    if form == "mxfp4":
        return mxfp4_folders(plain, root)
    config, write = FORMATS[form]
    quantised, twin = root / form, root / f"{form} twin"
    for folder in (quantised, twin):
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored, plainly = {}, {}
    for file in plain.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer, _, own = name.rpartition(".")
            stored[name] = plainly[name] = tensor
            is_kept = layer.endswith(LEFT_OUT) or layer.startswith(kept)
            if ".layers." in name and own == "weight" and tensor.dim() == 2 and not is_kept:
                tensors, plainly[name] = write(tensor.float())
                del stored[name]
                stored |= {f"{layer}.{each}": value for each, value in tensors.items()}
    save_file(stored, quantised / "model.safetensors")
    save_file(plainly, twin / "model.safetensors")
    path = quantised / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return quantised, twin


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(plain_XKN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(blocks [X, N, G, 16], exponents [X, N, G], what they stand for [X, K, N]): a power of two for 32 inputs."""
    groups = plain_XKN.transpose(1, 2).unflatten(2, (-1, 32))
    exponents = groups.abs().amax(3).log2().floor() - 2  # the largest number lies between 4 and 8
    scaled = groups / 2 ** exponents[..., None]
    codes = (scaled.abs()[..., None] - torch.tensor(E2M1)).abs().argmin(-1)
    twin = (torch.tensor(E2M1)[codes] * scaled.sign() * 2 ** exponents[..., None]).flatten(2).transpose(1, 2)
    codes = codes | (scaled < 0) << 3
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), (exponents + 127).to(torch.uint8), twin.contiguous()


def mxfp4_folders(plain: Path, root: Path) -> tuple[Path, Path]:
    """(GPT-OSS with experts in MXFP4, twin) of the plain one, below `root`."""
    quantised, twin = root / "mxfp4", root / "mxfp4 twin"
    for folder in (quantised, twin):
        shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    plainly = {name: tensor for file in plain.glob("*.safetensors") for name, tensor in load_file(file).items()}
    stored = dict(plainly)
    for name in list(stored):
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"], plainly[name] = mxfp4(stored.pop(name))
    save_file(stored, quantised / "model.safetensors")
    save_file(plainly, twin / "model.safetensors")
    path = quantised / "config.json"
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return quantised, twin
