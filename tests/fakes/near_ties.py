"""Tokens of a rounded model against those of the exact one: where they part, it must have been a near tie."""

from __future__ import annotations

from pathlib import Path

import torch

from tiny_models import reference_greedy, reference_model


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
        rounded_model = type(exact)(exact.config).to(dtype)
        rounded_model.load_state_dict(exact.state_dict())
        rounded = rounded_model.to("cuda")(sequence.cuda()).logits[0, -1].float().cpu()
    error = float((logits - rounded).abs().max())
    gap = float(logits[expected[agree]] - logits[tokens[agree]])
    assert gap < 3 * error, f"token {agree} differs though the gap {gap:.4f} is wide (logit error {error:.4f})"
    return agree
