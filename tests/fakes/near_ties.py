"""Tokens of a rounded model against those of the exact one: where they part, it must have been a near tie."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

from tiny_models import reference_greedy, reference_model

DEVICE = "cuda:0" if torch.cuda.is_available() else "cpu"


def check_against_reference(folder: Path, prompt: list[int], tokens: list[int], dtype: torch.dtype) -> int:
    """How many tokens agree; asserts that the first that does not was a tie within 3 × the measured logit error."""
    expected = reference_greedy(folder, prompt, len(tokens)).token_ids
    agree = next((i for i, (a, b) in enumerate(zip(tokens, expected, strict=True)) if a != b), len(tokens))
    if agree == len(tokens):
        return agree
    sequence = torch.tensor([prompt + expected[:agree]])
    exact = reference_model(folder)
    with torch.inference_mode():
        logits = exact(sequence).logits[0, -1]
        rounded = _rounded(folder, dtype)(sequence.to(DEVICE)).logits[0, -1].float().cpu()
    error = float((logits - rounded).abs().max())
    gap = float(logits[expected[agree]] - logits[tokens[agree]])
    assert gap < 3 * error, f"token {agree} differs though the gap {gap:.4f} is wide (logit error {error:.4f})"
    return agree


def widest_gap(folder: Path, prompt: list[int], tokens: list[int], dtype: torch.dtype) -> tuple[float, float, int]:
    """(by how much a token's exact logit, given the tokens before it, stays below the best one's, at most; the largest
    logit error of the model rounded to `dtype` along the way; which token has that gap). Greedy tokens have a gap
    within some of these errors, however early they have left another greedy run of the same prompt."""
    sequence = torch.tensor([prompt + tokens[:-1]])
    first = len(prompt) - 1
    with torch.inference_mode():
        exact = reference_model(folder)(sequence).logits[0, first:].float()
        rounded = _rounded(folder, dtype)(sequence.to(DEVICE)).logits[0, first:].float().cpu()
    chosen = exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    gap, index = (exact.max(1).values - chosen).max(0)
    return float(gap), float((exact - rounded).abs().max()), int(index)


@cache
def _rounded(folder: Path, dtype: torch.dtype):  # type: ignore[no-untyped-def]
    exact = reference_model(folder)
    rounded = type(exact)(exact.config).to(dtype)
    rounded.load_state_dict(exact.state_dict())
    return rounded.to(DEVICE).eval()
