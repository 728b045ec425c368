"""Quantised weights served: tokens of the dequantised weights by transformers, on one node, split, with adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantised_checkpoints import quantised_folders
from split_pair import GREEDY, run_both_ways
from tiny_adapters import merged, tiny_adapter
from tiny_hf_models import tiny_hf_model

from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.contracts.wire.parts import AdapterRef
from tiny_models import check_greedy, tiny_model


@pytest.mark.parametrize(("kind", "form"), [("qwen3_moe", "fp8_blocks"), ("llama", "awq"), ("gpt_oss", "mxfp4")])
def test_greedy_tokens_are_those_of_the_dequantised_weights(kind: str, form: str, tmp_path: Path) -> None:
    """By transformers, which is given what the numbers stand for; GPT-OSS with sinks and alternating windows."""
    folder, twin = quantised_folders(tiny_hf_model(kind) if form == "mxfp4" else tiny_model(kind), tmp_path, form)
    adapter = tiny_adapter(tmp_path / "adapter", twin, targets=("q_proj", "v_proj", "o_proj"), scale=0.7)
    with_it = merged(tmp_path / "merged", twin, adapter)
    made = run_both_ways(folder, (17, 90), AdapterRef(str(adapter), read_adapter(str(adapter)).digest))
    for model, (prompt, output) in zip([with_it] * 4 + [twin] * 4, made, strict=True):
        check_greedy(model, prompt, output, GREEDY.max_tokens)
