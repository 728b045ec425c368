"""What fp8 KV loses, sampled while serving on CUDA."""

from __future__ import annotations

import pytest
import torch
from waiting import wait_until

from in_process_cluster import client_of, cuda_pair
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import random_prompt, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM_TOKENS = 12


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_steps_are_measured(kv_cache_dtype: str) -> None:
    nodes = decode, prefill = cuda_pair(tiny_model("llama"), kv_cache_dtype=kv_cache_dtype, kv_quality_sample_rate=1.0)
    quality = decode.process.quality
    assert quality is not None
    with client_of(nodes) as client:
        sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        result = client.submit("r", random_prompt(40, seed=9), sampling, decode=decode.info, prefill=prefill.info)
        client.wait()
        assert result.failed is None, result.failed
        wait_until(lambda: quality.counters()["kv_quality_samples"] >= NUM_TOKENS - 1, "every step to be measured")
    counters = quality.counters()
    error = counters["kv_quality_error"] / counters["kv_quality_samples"]
    assert 0 <= error < 0.5
    assert error > 1e-3 or kv_cache_dtype == "auto"
