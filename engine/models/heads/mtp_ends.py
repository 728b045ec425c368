"""What stands before the layer of a head for multi-token prediction, and behind it, whoever computes that layer.

Legend: T tokens of the step, R rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tandem.engine.models.layers.basic import Linear, RMSNorm
from tandem.engine.models.layers.decoder_layer import allocate_parameters
from tandem.kernels.products.matmul import linear


class MtpEnds(nn.Module):
    """The way into the layer, from embeddings and features, and the way out, to logits. Whole on every rank. Parameters
    are uninitialised until a loader fills them."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        embedding_VE: torch.Tensor,
        output_VE: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        hidden_first: bool = False,
        carries_normed: bool = False,
    ) -> None:
        """`embedding_VE`, `output_VE`: the served model's, which it reads. `hidden_first`, `carries_normed`: see
        `MtpConfig`."""
        super().__init__()
        self._hidden_first, self._carries_normed = hidden_first, carries_normed
        with torch.device("meta"):
            self.enorm, self.hnorm, self.norm = (RMSNorm(hidden_size, eps) for _ in range(3))
            self.eh_proj = Linear(2 * hidden_size, hidden_size, bias=False)
        self.to(dtype)
        allocate_parameters(self, device)
        self.embedding_VE, self.output_VE = embedding_VE.detach(), output_VE.detach()

    def take_own(self, embedding_VE: torch.Tensor | None, output_VE: torch.Tensor | None) -> None:
        """Uses these in place of the model's matrices. None, and copies of the model's: stays with those."""
        if embedding_VE is not None and not torch.equal(own := embedding_VE.to(self.embedding_VE), self.embedding_VE):
            self.embedding_VE = own
        if output_VE is not None and not torch.equal(own := output_VE.to(self.output_VE), self.output_VE):
            self.output_VE = own

    def enter(self, token_T: torch.Tensor, feature_TE: torch.Tensor) -> torch.Tensor:
        """[T, E]: the layer's input, of tokens and the features of the tokens before them."""
        both = self.enorm(F.embedding(token_T, self.embedding_VE)), self.hnorm(feature_TE)
        projected: torch.Tensor = self.eh_proj(torch.cat(both[::-1] if self._hidden_first else both, dim=-1))
        return projected

    def carry(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """[R, E]: what stands for the next feature, of what leaves the layer."""
        return self.norm(hidden_RE) if self._carries_normed else hidden_RE

    def project(self, carried_RE: torch.Tensor) -> torch.Tensor:
        """[R, E], as `carry` makes it -> logits [R, V]."""
        return linear(carried_RE if self._carries_normed else self.norm(carried_RE), self.output_VE)
