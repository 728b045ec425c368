"""A gated MLP. T tokens of the step, R of a step of few rows, E hidden size."""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.models.layers.basic import Linear
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.products import few_rows
from tandem.kernels.products.adapter_rows import UnaddedProduct
from tandem.kernels.products.adapters import added, expand_silu_mul, linear_and_low
from tandem.kernels.products.fused_ops import silu_mul
from tandem.kernels.products.matmul import group_gate_up, linear_silu_mul
from tandem.kernels.products.matmul_plans import GATE_UP_GROUP
from tandem.kernels.products.quantised import RoundedRows


class MLP(nn.Module):
    """down(silu(gate) * up). gate_up_proj is loaded as gate over up; `group` then lets rows of both take turns, so that
    one product can end in silu(gate) * up."""

    def __init__(self, hidden_size: int, width: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up_proj = Linear(hidden_size, 2 * width, bias=bias)
        self.down_proj = Linear(width, hidden_size, bias=bias)
        self.is_grouped = False

    def group(self) -> None:
        both = self.gate_up_proj
        if self.is_grouped or both.bias is not None or both.out_features % (2 * GATE_UP_GROUP):
            return
        if both.quantised is None:
            both.weight.data = group_gate_up(both.weight.data)
        else:
            order = torch.arange(both.out_features, device=both.quantised.scales.device)
            both.hold(both.quantised.reordered(group_gate_up(order)))
        self.is_grouped = True

    def forward(self, x_TE: torch.Tensor | RoundedRows) -> torch.Tensor:
        product = self.product_onto(None, x_TE)
        assert product is not None
        return added(product)

    def product_onto(
        self, stream_TE: torch.Tensor | None, x_TE: torch.Tensor | RoundedRows
    ) -> torch.Tensor | UnaddedProduct | None:
        """`forward` for who adds the adapters of the last product itself, or has them `added`; None where all has been
        added to the stream on the way."""
        both, group = self.gate_up_proj, GATE_UP_GROUP if self.is_grouped else 0
        if both.adapters is not None and (rows := get_forward_context().adapters) is not None:
            assert isinstance(x_TE, torch.Tensor)
            gate_up, low = linear_and_low(x_TE, both.matrix, both.bias, both.adapters, rows)
            activated = expand_silu_mul(gate_up, low, both.adapters, rows, group)
        elif self.is_grouped:
            activated = linear_silu_mul(x_TE, both.matrix)
        else:
            activated = silu_mul(both(x_TE))
        return self.down_proj.product_onto(stream_TE, activated)

    def forward_few_rows(self, residual_RE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> None:
        """residual += MLP of the normalised residual, in two launches."""
        activated = few_rows.norm_linear_silu_mul(residual_RE, gain_E, eps, self.gate_up_proj.weight)
        few_rows.add_linear(residual_RE, activated, self.down_proj.weight, self.down_proj.bias)

    def few_rows_products(self) -> tuple[tuple[int, int], ...]:
        """(outputs, inputs) of the products of `forward_few_rows`; none if it can't be called."""
        blocks = self.gate_up_proj, self.down_proj
        if not self.is_grouped or any(block.quantised is not None for block in blocks):
            return ()
        return tuple((block.out_features, block.in_features) for block in blocks)
