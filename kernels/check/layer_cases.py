"""What runs between a layer's matrix products, the products themselves and sampling, with work and error.

Legend: T tokens, R rows, V vocabulary.
"""

from __future__ import annotations

import torch

from tandem.kernels.api.backend import PagedKV
from tandem.kernels.backends.native import NativeOps
from tandem.kernels.blocks.quantization import overflow_counter, scale_tensor
from tandem.kernels.check.kernel_cases import TOLERANCE, Case, Shape, relative_error
from tandem.kernels.check.sample_batches import LAYER, NUM_LAYERS
from tandem.kernels.products import fused_ops, matmul
from tandem.kernels.reference import sampling
from tandem.kernels.sampling.sampling import sample_tokens
from tandem.kernels.sampling.token_masks import ban_tokens

EPSILON = 1e-5  # as Llama has it
CHECKED_ROWS = 4  # of a sampled batch, against the slow definition; a guess
# Name -> top_k, top_p, min_p.
FILTERS = {"": (0, 1.0, 0.0), "top-k 50": (50, 1.0, 0.0), "top-p 0.9": (0, 0.9, 0.0), "both": (50, 0.9, 0.0)}


def rope_case(shape: Shape, num_tokens: int) -> Case:
    """Rotation of queries and keys and the store of keys and values."""
    spec, device = shape.spec, shape.device
    size, heads, kv_heads = spec.head_size, spec.num_heads, spec.num_kv_heads
    num_blocks = -(-num_tokens // shape.block_size) + 1
    pool = torch.zeros(num_blocks, kv_heads, NUM_LAYERS, 2, shape.block_size, size, device=device).to(shape.cache_dtype)
    layer = pool[:, :, LAYER]
    angles = torch.rand(num_tokens, size // 2, device=device) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    positions = torch.arange(num_tokens, device=device)
    slots = torch.randperm(num_blocks * shape.block_size, device=device)[:num_tokens]
    qkv = shape.random(num_tokens, shape.columns)
    scales = (scale_tensor(1.0, device), scale_tensor(1.0, device), overflow_counter(device)) if spec.is_fp8 else None
    target = fused_ops.CacheSlots(layer[:, :, 0], layer[:, :, 1], slots, scales)

    def run() -> None:
        if fused_ops.is_fused(qkv):
            fused_ops.rope_and_store(qkv, positions, table, heads, kv_heads, None, target)
        else:
            _, key, value = fused_ops.rotate_heads(qkv, positions, table, heads, kv_heads)
            NativeOps.write(key, value, PagedKV.of_layer(layer), slots)

    def error() -> float:
        qkv.copy_(shape.random(num_tokens, shape.columns))
        few = slice(0, min(num_tokens, 300))
        _, key, value = fused_ops.rotate_heads(qkv[few].double(), positions[few], table.double(), heads, kv_heads)
        run()
        at = slots[few]
        stored = layer.double()[at // shape.block_size, :, :, at % shape.block_size]
        return relative_error(stored, torch.stack((key, value), dim=2))

    read, rotated = shape.columns, (heads + kv_heads) * size
    stored_bytes = 2 * kv_heads * size * shape.cache_dtype.itemsize
    work = num_tokens * ((read + rotated) * shape.dtype.itemsize + stored_bytes + size * 4)
    tolerance = 1 / 16 if spec.is_fp8 else TOLERANCE[shape.dtype]  # e4m3 has three bits after the point
    return Case("rope + cache write", f"{num_tokens} tokens", work, False, run, error, tolerance)


def norm_case(shape: Shape, num_tokens: int, hidden: int) -> Case:
    """Residual add and RMS norm."""
    x, residual, weight = shape.random(num_tokens, hidden), shape.random(num_tokens, hidden), shape.random(hidden)

    def error() -> float:
        residual.copy_(shape.random(num_tokens, hidden))
        total = (x.double() + residual.double()).to(shape.dtype).double()  # the sum is stored before it is normed
        expected = weight.double() * total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPSILON)
        return relative_error(fused_ops.add_rms_norm(x, residual, weight, EPSILON), expected)

    def run() -> torch.Tensor:
        return fused_ops.add_rms_norm(x, residual, weight, EPSILON)

    work = 4 * x.numel() * shape.dtype.itemsize
    return Case("add + RMS norm", f"{num_tokens} x {hidden}", work, False, run, error, TOLERANCE[shape.dtype])


def silu_case(shape: Shape, num_tokens: int, width: int) -> Case:
    gate_up = shape.random(num_tokens, 2 * width)

    def run() -> torch.Tensor:
        return fused_ops.silu_mul(gate_up)

    def error() -> float:
        gate, up = gate_up.double().chunk(2, dim=1)
        return relative_error(run(), torch.nn.functional.silu(gate) * up)

    work = 3 * num_tokens * width * shape.dtype.itemsize
    return Case("silu * up", f"{num_tokens} x {width}", work, False, run, error, TOLERANCE[shape.dtype])


def product_case(shape: Shape, num_rows: int, outputs: int, inputs: int) -> Case:
    """A product of few rows: as fast as its weights can be read."""
    x, weight = shape.random(num_rows, inputs), shape.random(outputs, inputs)
    matmul.prepare(shape.device)

    def run() -> torch.Tensor:
        return matmul.linear(x, weight)

    def error() -> float:
        return relative_error(run(), x.double() @ weight.double().t())

    size = f"{num_rows} x {inputs} -> {outputs}"
    return Case("product", size, weight.numel() * shape.dtype.itemsize, False, run, error, TOLERANCE[shape.dtype])


def sampling_case(shape: Shape, num_rows: int, vocabulary: int, filters: str = "") -> Case:
    """Tokens drawn from logits. Its work is to read each logit once, however often the filters read them."""
    top_k, top_p, min_p = FILTERS[filters]
    device = shape.device
    logits = (torch.randn(num_rows, vocabulary, device=device) * 3).to(shape.dtype)
    order = torch.arange(num_rows, device=device)

    def column(value: float) -> torch.Tensor:
        return torch.full((num_rows,), value, device=device)

    settings = (column(0.8), order * 0 + top_k, column(top_p), column(min_p), order, order, order)

    def run() -> torch.Tensor:
        return sample_tokens(logits, *settings, filtered=bool(filters))

    def error() -> float:
        few = [setting[:CHECKED_ROWS].cpu() for setting in settings]
        expected = sampling.sample_tokens(logits[:CHECKED_ROWS].cpu(), *few)
        return (run()[:CHECKED_ROWS].cpu() != expected).double().mean().item()

    name = f"sampling, {filters}" if filters else "sampling"
    return Case(name, f"{num_rows} x {vocabulary}", logits.numel() * shape.dtype.itemsize, False, run, error, 0.0)


def mask_case(shape: Shape, num_rows: int, vocabulary: int) -> Case:
    """Half of the tokens banned, by a bit each. Its work is to read each bit and to write what is banned."""
    logits = shape.random(num_rows, vocabulary)
    rows = torch.arange(num_rows, device=shape.device)
    words = torch.randint(-(1 << 31), 1 << 31, (num_rows, -(-vocabulary // 32)), device=shape.device).to(torch.int32)

    def run() -> torch.Tensor:
        ban_tokens(logits, rows, words)
        return logits

    def error() -> float:
        few = (logits[:1].cpu(), torch.zeros(1, dtype=torch.int64), words[:1].cpu())
        return (run()[:1].cpu() != sampling.ban_tokens(*few)).double().mean().item()

    work = words.numel() * 4 + logits.numel() * shape.dtype.itemsize // 2
    return Case("token masks", f"{num_rows} x {vocabulary}", work, False, run, error, 0.0)


def greedy_case(shape: Shape, num_rows: int, vocabulary: int) -> Case:
    logits = shape.random(num_rows, vocabulary)

    def run() -> torch.Tensor:
        return fused_ops.argmax_tokens(logits)

    def error() -> float:
        return (run() != logits.double().argmax(-1)).double().mean().item()

    work = logits.numel() * shape.dtype.itemsize
    return Case("greedy sampling", f"{num_rows} x {vocabulary}", work, False, run, error, 0.0)
