"""Attention over latents on a CPU: steps of every kind give what heads with keys and values of their own give."""

from __future__ import annotations

import pytest
import torch
from latent_cases import expected_rows, made_case

from tandem.kernels.api import latent_attention
from tandem.kernels.api.attention import Attention
from tandem.kernels.api.errors import BackendUnavailableError
from tandem.kernels.backends.native import NativeBackend

BATCHES = {
    "decode": ((1, 1, 1), (33, 1, 16)),
    "prompts": ((5, 17), (5, 17)),
    "prompts-with-earlier-tokens": ((3, 16, 2), (40, 33, 2)),
    "mixed": ((1, 1, 9, 20, 4), (30, 1, 25, 20, 36)),
}


def layer_of(heads: int, width: int, latent: int, scale: float) -> Attention:
    return Attention(heads, width, scale, 1, latent_size=latent, layer_name="l")


@pytest.mark.parametrize("key_width", [16, 4])  # heads' keys are wider than their values, or narrower
@pytest.mark.parametrize("lengths", BATCHES)
def test_steps(lengths: str, key_width: int) -> None:
    case = made_case(*BATCHES[lengths], 4, 16, 8, 16, torch.float64, key_width=key_width, value_width=14)
    output = case.run(layer_of(4, 24, 16, case.scale))
    torch.testing.assert_close(output, expected_rows(case), rtol=1e-9, atol=1e-9)


def test_heads_take_turns_where_all_would_be_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    case = made_case(*BATCHES["mixed"], 12, 16, 8, 16, torch.float64)
    monkeypatch.setattr(latent_attention, "MADE_BYTES", 1)
    assert latent_attention._heads_at_once(12, 10) == 3
    output = case.run(layer_of(12, 24, 16, case.scale))
    torch.testing.assert_close(output, expected_rows(case), rtol=1e-9, atol=1e-9)


def test_without_a_cache_every_row_is_a_whole_prompt() -> None:
    case = made_case((1, 7), (1, 7), 4, 16, 8, 16, torch.float64)
    wanted, case.cache = expected_rows(case), torch.empty(0)
    torch.testing.assert_close(case.run(layer_of(4, 24, 16, case.scale)), wanted, rtol=1e-9, atol=1e-9)


def test_first_tokens_that_are_hidden() -> None:
    case = made_case((1, 1, 1), (33, 2, 16), 4, 16, 8, 16, torch.float64)
    layer = Attention(4, 24, case.scale, 1, latent_size=16, layer_name="l", hides_first=True)
    torch.testing.assert_close(case.run(layer), expected_rows(case.without_first()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lengths", BATCHES)
def test_rows_are_stored_where_nobody_attends(lengths: str) -> None:
    case, other = (made_case(*BATCHES[lengths], 4, 16, 8, 16, torch.float64) for _ in range(2))
    case.run_store(layer_of(4, 24, 16, case.scale))
    other.store()
    torch.testing.assert_close(case.cache, other.cache, rtol=1e-9, atol=1e-9)


def test_backends_that_know_no_latents_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeBackend, "serves_latents", False)
    layer = Attention(4, 24, 1.0, 1, latent_size=16, layer_name="l", attn_backend="native")
    with pytest.raises(BackendUnavailableError, match="latents in place of keys and values"):
        layer.backends(torch.device("cpu"), torch.float32, layer.spec.attn_type, 16)
