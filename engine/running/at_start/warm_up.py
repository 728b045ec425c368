"""The steps that warm-up runs: between them every kernel that serving needs, and the most memory a step can take."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tandem.engine.running.sampler import LogitEdits, RandomSettings, SamplingBatch, TokenMasks
from tandem.engine.scheduling.step import ScheduledRow
from tandem.kernels.products.matmul_plans import LONGEST_TUNED, without_whole_tiles


def extreme_steps(
    max_num_tokens: int, max_chunk: int, max_model_len: int, max_decode_rows: int, *, every_size: bool = False
) -> Iterator[list[ScheduledRow]]:
    """Yields the rows of each step, all of slot 0, those of one token first. The steps are: the token budget in as few
    rows as can be; decodes only; a decode beside later chunks of prompts, about as many tokens, but not whole tiles,
    since products of those need less memory; and a lone token, which has kernels of its own. `every_size`: also 2, 4,
    8 … decodes, then chunks of as many tokens as there are never decodes, since a product of few rows has a kernel by
    their number, and those of the wanted tokens alone are in no captured step."""
    longest = min(max_chunk, max_model_len)
    prompts = [ScheduledRow(0, 0, length) for length in _chunks(max_num_tokens, longest)]
    if prompts:  # else every step is of single tokens
        yield prompts
    yield [ScheduledRow(0, 0, 1)] * max_decode_rows
    beside = without_whole_tiles(max_num_tokens) - 1
    later = [ScheduledRow(0, 1, length) for length in _chunks(beside, min(max_chunk, max_model_len - 1))]
    if later:
        yield [ScheduledRow(0, 0, 1), *later]
    if max_decode_rows > 1:
        yield [ScheduledRow(0, 0, 1)]
    num_rows = 2
    while every_size and num_rows < LONGEST_TUNED:
        if num_rows < max_decode_rows:
            yield [ScheduledRow(0, 0, 1)] * num_rows
        elif num_rows <= min(longest, max_num_tokens):
            yield [ScheduledRow(0, 0, num_rows)]
        num_rows *= 2


def _chunks(num_tokens: int, longest: int) -> list[int]:
    """The lengths of as few chunks as hold so many tokens, or one less: a single token would count as a decode row, and
    those come first."""
    full, rest = divmod(num_tokens, longest)
    return [length for length in (*[longest] * full, rest) if length > 1]


def every_way_to_sample(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[SamplingBatch]:
    """Yields settings for greedy, drawn, filtered and masked rows, with plain and with edited logits. Where nothing is
    compiled, only the last of them, which need most memory."""
    zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
    half = torch.full((num_rows,), 0.5, device=device)
    rows = torch.arange(num_rows, device=device)
    edits = LogitEdits(rows, zeros, half)
    masks = TokenMasks(rows, torch.full((num_rows, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device))
    unfiltered, filtered = (
        RandomSettings(half, zeros + 8, half, half, rows, zeros, zeros, filtered=kind) for kind in (False, True)
    )
    if device.type == "cuda":
        yield from (SamplingBatch(changed, random=kind) for changed in (None, edits) for kind in (None, unfiltered))
        yield SamplingBatch(random=filtered)
        yield SamplingBatch(is_guided=True, masks=masks)
    yield SamplingBatch(edits, random=filtered, logprob_row_L=rows, max_num_logprobs=8, is_guided=True, masks=masks)
