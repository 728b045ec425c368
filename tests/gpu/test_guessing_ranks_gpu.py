"""Tokens guessed ahead on nodes of two GPUs: by a head that ranks share out, in graphs, and by a draft model on the
first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from eagle_heads import knowing_head, walking_model
from mtp_heads import knowing_mtp
from served_head import check_knowing_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.several_gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
ON_GPUS = {"transport": "auto", "dtype": "float32", "device": "cuda", "block_size": 64}


def test_ranks_share_an_eagle_head_out(tmp_path: Path) -> None:
    model, head = walking_model(tmp_path / "model"), knowing_head(tmp_path / "head")
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}
    check_knowing_on_ranks({"unified": 2}, model, json.dumps(config), **ON_GPUS)


def test_ranks_share_a_layer_with_latents_out(tmp_path: Path) -> None:
    config = {"method": "mtp", "num_speculative_tokens": 3}
    check_knowing_on_ranks({"unified": 2}, knowing_mtp(tmp_path, "deepseek_v3").served, json.dumps(config), **ON_GPUS)


def test_the_first_rank_has_the_draft_model(tmp_path: Path) -> None:
    """The model itself, so that its guesses are right."""
    model = walking_model(tmp_path / "model")
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 4}
    check_knowing_on_ranks({"unified": 2}, model, json.dumps(config), **ON_GPUS)
