"""Linear layers and norms, as every layer of our own has them. T tokens, K inputs, E hidden size."""

from __future__ import annotations

import torch
from torch import nn

from tandem.engine.parallel.group import TensorParallel
from tandem.kernels.api.forward_context import get_forward_context
from tandem.kernels.products import quantised
from tandem.kernels.products.adapter_rows import AdapterStack, UnaddedProduct
from tandem.kernels.products.adapters import added, linear_and_low, norm_adds
from tandem.kernels.products.fused_ops import add_rms_norm, rms_norm
from tandem.kernels.products.matmul import linear, linear_onto
from tandem.kernels.products.quantised import RoundedRows
from tandem.kernels.products.quantised_weight import QuantisedWeight


class Linear(nn.Linear):
    """A linear layer that uses the fastest product for the number of rows. With `adapters`, rows that take one get its
    product added. A quantised one has `quantised` in place of a weight."""

    adapters: AdapterStack | None = None
    quantised: QuantisedWeight | None = None

    def hold(self, weight: QuantisedWeight) -> None:
        """Takes a quantised weight in place of the parameter."""
        if self.quantised is None:
            del self.weight
        self.quantised = weight

    def make_plain(self, dtype: torch.dtype) -> None:
        """Makes a quantised weight a parameter again, for who does more with it than multiply rows."""
        if self.quantised is not None:
            self.weight = nn.Parameter(self.quantised.dequantised(dtype), requires_grad=False)
            self.quantised = None

    @property
    def matrix(self) -> torch.Tensor | QuantisedWeight:
        """What products multiply by, [out_features, in_features]."""
        return self.weight if self.quantised is None else self.quantised

    def some_outputs(self, x_TK: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Outputs `start` to `stop`, without adapters."""
        weight = self.weight[start:stop] if self.quantised is None else self.quantised.rows(start, stop)
        return linear(x_TK, weight, None if self.bias is None else self.bias[start:stop])

    def take_adapters(self, stack: AdapterStack) -> None:
        self.adapters = stack

    def rounds(self, x_TK: torch.Tensor) -> bool:
        """Whether rows like these may come rounded."""
        return self.quantised is not None and self.adapters is None and quantised.rounds(x_TK, self.quantised)

    def forward(self, x_TK: torch.Tensor | RoundedRows) -> torch.Tensor:
        """x @ weight^T + bias, plus the adapters of the step's rows."""
        return added(self.product(x_TK))

    def product(self, x_TK: torch.Tensor | RoundedRows) -> torch.Tensor | UnaddedProduct:
        """`forward` for who adds the adapters of the step's rows itself, or has them `added`."""
        if self.adapters is None or (rows := get_forward_context().adapters) is None:
            return linear(x_TK, self.matrix, self.bias)
        assert isinstance(x_TK, torch.Tensor)
        return UnaddedProduct(*linear_and_low(x_TK, self.matrix, self.bias, self.adapters, rows), self.adapters, rows)

    def product_onto(
        self, stream_TE: torch.Tensor | None, x_TK: torch.Tensor | RoundedRows
    ) -> torch.Tensor | UnaddedProduct | None:
        """`product`, or None where it has been added to the stream on the way."""
        adds_more = self.bias is not None or (self.adapters is not None and get_forward_context().adapters is not None)
        if stream_TE is not None and not adds_more and linear_onto(stream_TE, x_TK, self.matrix):
            return None
        return self.product(x_TK)


class RMSNorm(nn.Module):
    """Root-mean-square norm with learned weights; adds to the residual stream first, and sums ranks' parts, if there
    are."""

    def __init__(self, size: int, eps: float, group: TensorParallel | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self._group = group

    def forward(
        self, x_TE: torch.Tensor | UnaddedProduct | None, residual_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Normalises x, or residual += x (in place) when there is one; in a group x is this rank's part of it. Of None
        and a residual the residual: nothing is left to be added."""
        if x_TE is None:
            x_TE, residual_TE = residual_TE, None
        assert x_TE is not None
        if residual_TE is None:
            return rms_norm(added(x_TE), self.weight, self.eps)
        if self._group is not None:
            return self._group.sum_add_rms_norm(added(x_TE), residual_TE, self.weight, self.eps)
        if isinstance(x_TE, UnaddedProduct) and not norm_adds(x_TE):
            x_TE = added(x_TE)
        return add_rms_norm(x_TE, residual_TE, self.weight, self.eps)

    def before(
        self,
        product: Linear | None,
        x_TE: torch.Tensor | UnaddedProduct | None,
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor | RoundedRows:
        """`forward`, rounded as the product would round it."""
        if x_TE is None:
            x_TE, residual_TE = residual_TE, None
        if self._group is None and product is not None and isinstance(x_TE, torch.Tensor) and product.rounds(x_TE):
            return quantised.rounded_rms_norm(x_TE, residual_TE, self.weight, self.eps)
        normed: torch.Tensor = self(x_TE, residual_TE)
        return normed
