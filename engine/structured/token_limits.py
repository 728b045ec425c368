"""Tokens that a sample may not take next, by their ids: all but some, or those that would complete a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.structured.grammars import Grammars


class TokenLimits:
    """The token ids that one sample is held to, and the sequences of ids that its output must not contain.

    W words of a mask: bit t % 32 of word t // 32 is the token t.
    """

    __slots__ = ("_allowed_W", "_banned", "_ends", "_num_before_ends", "_output")

    def __init__(self, sampling: SamplingParams, grammars: Grammars, output: Sequence[int]) -> None:
        """`output`: what the sample has drawn so far."""
        self._allowed_W: np.ndarray | None = None
        if sampling.allowed_token_ids:
            bits = np.zeros(32 * grammars.num_words, np.uint8)
            bits[list(sampling.allowed_token_ids)] = 1
            self._allowed_W = np.packbits(bits, bitorder="little").view(np.int32)
        self._banned = sampling.bad_words
        ends = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else grammars.eos_token_ids))
        self._ends = [token_id for token_id in ends if token_id < 32 * grammars.num_words]
        self._num_before_ends = sampling.min_tokens
        self._output = list(output)

    def copy(self) -> TokenLimits:
        """Another sample's limits at the same place; what never changes is shared."""
        copied = TokenLimits.__new__(TokenLimits)
        for name in TokenLimits.__slots__:
            setattr(copied, name, getattr(self, name))
        copied._output = self._output.copy()
        return copied

    def narrow(self, mask_W: np.ndarray) -> None:
        """Clears the bits of banned tokens in an int32 mask, in place. Ends before min_tokens are among them, which the
        sampler bans besides, so that a mask that leaves nothing is seen to."""
        if self._allowed_W is not None:
            mask_W &= self._allowed_W
        banned = list(self._ends) if len(self._output) < self._num_before_ends else []
        for *before, last in self._banned:
            if not before or self._output[-len(before) :] == before:
                banned.append(last)
        words_W = mask_W.view(np.uint32)
        for token_id in banned:
            words_W[token_id // 32] &= np.uint32(~(1 << token_id % 32) & 0xFFFFFFFF)

    def take(self, token_id: int) -> None:
        self._output.append(token_id)
