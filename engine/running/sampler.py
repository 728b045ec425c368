"""Logits to tokens and log-probabilities, for rows of mixed settings in one batch. Nothing here waits for the device.

Order: logit_bias, min_tokens (EOS and stop ids are banned until then), repetition / presence / frequency penalties, the
masks of grammars and of token limits, then temperature, top_k, top_p, min_p and Gumbel-max
(`kernels/sampling/sampling.py`). Greedy rows take the argmax of the penalised logits, the lowest id on ties.
Log-probabilities are those of the model itself: log_softmax of the logits before any of this; a beam's are changed by
what biases, bans and masks change, since its candidates are chosen by them.

Which rows need what is decided on the host (`batch_state.py`), so a batch pays only for what its rows ask for.

Shape legend: N sampled rows, P rows with penalties, L rows with logprobs, K most logprobs asked for, E sparse entries,
M rows with masks, W words of a mask, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.kernels.products.fused_ops import argmax_tokens
from tandem.kernels.sampling.sampling import sample_tokens
from tandem.kernels.sampling.token_masks import ban_tokens


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Sparse changes of single logits. `row_E`, `token_E` int64; `value_E` float32 (added; -inf bans the token)."""

    row_E: torch.Tensor
    token_E: torch.Tensor
    value_E: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties: `row_P` int64; the settings float32 [P]; `output_counts_PV` int32; `in_prompt_PV` bool."""

    row_P: torch.Tensor
    repetition_P: torch.Tensor
    presence_P: torch.Tensor
    frequency_P: torch.Tensor
    output_counts_PV: torch.Tensor
    in_prompt_PV: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens rows may take: `row_M` int64; `mask_MW` int32, bit t % 32 of word t // 32 for the token t."""

    row_M: torch.Tensor
    mask_MW: torch.Tensor


@dataclass(frozen=True, slots=True)
class RandomSettings:
    """What `sample_tokens` takes, for all N rows; some row's temperature is above 0.

    `filtered`: some such row has top_k > 0, top_p < 1 or min_p > 0.
    """

    temperature_N: torch.Tensor  # float32; 0: the most likely token
    top_k_N: torch.Tensor  # int64; 0: off
    top_p_N: torch.Tensor  # float32
    min_p_N: torch.Tensor  # float32
    seed_N: torch.Tensor  # int64: the bits of a u64
    sample_index_N: torch.Tensor  # int64
    output_index_N: torch.Tensor  # int64
    filtered: bool


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The settings of the rows of one step. A field that is None is one that no row asks for."""

    edits: LogitEdits | None = None
    penalties: Penalties | None = None
    random: RandomSettings | None = None
    logprob_row_L: torch.Tensor | None = None  # int64
    max_num_logprobs: int = 0
    is_guided: bool = False  # some row has a mask, which whoever draws brings
    masks: TokenMasks | None = None
    is_beam_L: torch.Tensor | None = None  # bool; None: no beam is edited or masked

    @property
    def is_greedy(self) -> bool:
        """Whether every row takes the most likely token, and nothing else is asked."""
        is_edited = self.edits is not None or self.penalties is not None or self.is_guided
        return not is_edited and self.random is None and self.logprob_row_L is None


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities (natural) of each row: the given token first, then the top K, best first. `rank_L` is the given
    token's rank, where 1 is best."""

    token_LK1: torch.Tensor  # int64 [L, K + 1]
    logprob_LK1: torch.Tensor  # float32 [L, K + 1]
    rank_L: torch.Tensor  # int64 [L]


@torch.inference_mode()
def sample(logits_NV: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, Logprobs | None]:
    """Tokens int64 [N] and the log-probabilities of the rows that ask. `logits_NV` of any float dtype, read only."""
    if batch.is_greedy:
        return argmax_tokens(logits_NV), None
    raw_LV = None if batch.logprob_row_L is None else logits_NV.index_select(0, batch.logprob_row_L).float()
    if batch.edits is not None or batch.penalties is not None:
        logits_NV = logits_NV.to(torch.float32, copy=True)
    elif batch.masks is not None:
        logits_NV = logits_NV.clone()
    if batch.edits is not None:
        logits_NV.index_put_((batch.edits.row_E, batch.edits.token_E), batch.edits.value_E, accumulate=True)
    if batch.penalties is not None:
        _apply_penalties(logits_NV, batch.penalties)
    if batch.masks is not None:
        ban_tokens(logits_NV, batch.masks.row_M, batch.masks.mask_MW)
    token_N = argmax_tokens(logits_NV) if batch.random is None else _draw(logits_NV, batch.random)
    if raw_LV is None:
        return token_N, None
    assert batch.logprob_row_L is not None
    chosen_L = token_N.index_select(0, batch.logprob_row_L)
    if batch.is_beam_L is None:
        return token_N, logprobs_of(raw_LV, chosen_L, batch.max_num_logprobs)
    edits_LV = logits_NV.index_select(0, batch.logprob_row_L).float() - raw_LV
    edits_LV = torch.where(batch.is_beam_L[:, None], edits_LV, 0.0)  # no product, since bans are infinite
    return token_N, logprobs_of(raw_LV, chosen_L, batch.max_num_logprobs, edits_LV)


def logprobs_of(
    logits_LV: torch.Tensor, token_L: torch.Tensor, num_logprobs: int, edits_LV: torch.Tensor | None = None
) -> Logprobs:
    """Log-probabilities of `token_L` (int64) and of the `num_logprobs` best tokens under float32 `logits_LV`, with
    `edits_LV` added to them."""
    logprob_LV = logits_LV.log_softmax(dim=-1)
    if edits_LV is not None:
        logprob_LV = logprob_LV + edits_LV
    token_L1 = token_L[:, None]
    chosen_L1 = logprob_LV.gather(1, token_L1)
    rank_L = (logprob_LV > chosen_L1).sum(dim=-1) + 1
    top = logprob_LV.topk(min(num_logprobs, logits_LV.shape[1]), dim=-1)
    return Logprobs(torch.cat((token_L1, top.indices), dim=1), torch.cat((chosen_L1, top.values), dim=1), rank_L)


def _apply_penalties(logits_NV: torch.Tensor, penalties: Penalties) -> None:
    """Repetition counts prompt and output tokens, presence and frequency only output tokens (as vLLM and OpenAI)."""
    logits_PV = logits_NV.index_select(0, penalties.row_P)
    count_PV = penalties.output_counts_PV
    in_output_PV = count_PV > 0
    repetition_P1 = penalties.repetition_P[:, None]
    repeated_PV = torch.where(logits_PV > 0, logits_PV / repetition_P1, logits_PV * repetition_P1)
    logits_PV = torch.where(in_output_PV | penalties.in_prompt_PV, repeated_PV, logits_PV)
    logits_PV -= penalties.frequency_P[:, None] * count_PV
    logits_PV -= penalties.presence_P[:, None] * in_output_PV
    logits_NV.index_copy_(0, penalties.row_P, logits_PV)


def _draw(logits_NV: torch.Tensor, settings: RandomSettings) -> torch.Tensor:
    return sample_tokens(
        logits_NV, settings.temperature_N, settings.top_k_N, settings.top_p_N, settings.min_p_N, settings.seed_N,
        settings.sample_index_N, settings.output_index_N, filtered=settings.filtered,
    )  # fmt: skip
