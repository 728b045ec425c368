"""Low-rank adapters (LoRA, arXiv 2106.09685) of many kinds in one batch: out += x A^T B^T, each row by its own adapter.

Letters as in adapter_rows.py. `expand` goes after the product that both belong to, or into what comes behind it, where
that takes an UnaddedProduct; `shrink` before it or, where the product lets it, beside it: `linear_and_low`. On GPUs by
kernels of kernels/triton_kernels/adapters/, else by the eager twins below, which are also what tests compare with.
"""

from __future__ import annotations

import torch

from tandem.kernels.products import matmul
from tandem.kernels.products.adapter_rows import AdapterRows, AdapterStack, UnaddedProduct
from tandem.kernels.products.fused_ops import is_fused, silu_mul
from tandem.kernels.products.quantised_weight import QuantisedWeight

# Of registers: 32 of 512 threads each; 64 of 128 for the keys and values of one head of 128.
MOST_WORDS_OF_NORM, MOST_RANK_OF_ROTATION = 1 << 16, 64


def linear_and_low(
    x_TK: torch.Tensor,
    weight_NK: torch.Tensor | QuantisedWeight,
    bias_N: torch.Tensor | None,
    stack: AdapterStack,
    rows: AdapterRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x @ weight^T + bias, what `shrink` makes of x), of decode rows side by side where a product of ours runs."""
    if rows.tiles is None and matmul.can_start_late(x_TK, weight_NK):
        from tandem.kernels.triton_kernels.adapters.launch import shrink_triton

        out = matmul.linear(x_TK, weight_NK, bias_N, late=True)
        return out, shrink_triton(x_TK, stack, rows, beside=True)
    low = shrink(x_TK, stack, rows)
    return matmul.linear(x_TK, weight_NK, bias_N), low


def shrink(x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> torch.Tensor:
    """x A^T, for `expand`: fp32 [splits, T, P * R], whose sum over splits it is; rows in `rows.order`. Where a row has
    no adapter for a part nothing is written."""
    if is_fused(x_TK):
        from tandem.kernels.triton_kernels.adapters.launch import shrink_triton

        return shrink_triton(x_TK, stack, rows)
    return shrink_eager(x_TK, stack, rows)


def expand(out_TN: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> None:
    """out += low B^T in place."""
    if is_fused(out_TN):
        from tandem.kernels.triton_kernels.adapters.launch import expand_triton

        expand_triton(out_TN, low, stack, rows)
    else:
        expand_eager(out_TN, low, stack, rows)


def added(product: torch.Tensor | UnaddedProduct) -> torch.Tensor:
    """The product with its adapters added, in place."""
    if isinstance(product, UnaddedProduct):
        expand(product.out, product.low, product.stack, product.rows)
        return product.out
    return product


def norm_adds(product: UnaddedProduct) -> bool:
    """Whether `add_rms_norm` adds such adapters itself: a program of it holds B of all outputs."""
    words = (1 << (product.out.shape[1] - 1).bit_length()) * product.stack.rank
    return _are_decode_rows(product) and words <= MOST_WORDS_OF_NORM


def rotation_adds(product: UnaddedProduct) -> bool:
    """Whether `rope_and_store` adds such adapters itself."""
    return _are_decode_rows(product) and product.stack.rank <= MOST_RANK_OF_ROTATION


def _are_decode_rows(product: UnaddedProduct) -> bool:
    return product.rows.tiles is None and is_fused(product.out)


def expand_silu_mul(
    gate_up_TG: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int
) -> torch.Tensor:
    """silu of the first part's outputs, times the second's, each with low B^T added: [T, G / 2] of all rows. `group`
    as in `silu_mul`. What `gate_up` holds after that is not said."""
    if is_fused(gate_up_TG):
        from tandem.kernels.triton_kernels.adapters.launch import expand_silu_mul_triton

        return expand_silu_mul_triton(gate_up_TG, low, stack, rows, group)
    return expand_silu_mul_eager(gate_up_TG, low, stack, rows, group)


def shrink_eager(x_TK: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> torch.Tensor:
    """The same, tile by tile in PyTorch, as are those below."""
    low = torch.zeros((1, len(x_TK), stack.a.shape[1]), dtype=torch.float32, device=x_TK.device)
    for first, row, slot in rows.adapted():
        for part, rank in enumerate(stack.ranks[slot - 1].tolist()[: len(stack.part_sizes)]):
            lanes = slice(part * stack.rank, part * stack.rank + rank)
            made = torch.nn.functional.linear(x_TK[row], stack.a[slot - 1, lanes])
            low[0, first : first + len(row), lanes] = made.float()
    return low


def expand_eager(out_TN: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows) -> None:
    for first, row, slot in rows.adapted():
        begin = 0
        for part, size in enumerate(stack.part_sizes):
            rank, start = int(stack.ranks[slot - 1, part]), part * stack.rank
            low_TR = low.sum(0)[first : first + len(row), start : start + rank].to(out_TN.dtype)
            out_TN[row, begin : begin + size] += low_TR @ stack.b[slot - 1, begin : begin + size, :rank].t()
            begin += size


def expand_silu_mul_eager(
    gate_up_TG: torch.Tensor, low: torch.Tensor, stack: AdapterStack, rows: AdapterRows, group: int
) -> torch.Tensor:
    added = torch.zeros_like(gate_up_TG)
    expand_eager(added, low, stack, rows)
    group = group or gate_up_TG.shape[1] // 2
    by_turns = added.view(len(added), 2, -1, group).transpose(1, 2).reshape(gate_up_TG.shape)
    return silu_mul(gate_up_TG + by_turns, group)
