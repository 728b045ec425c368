"""Models that run by the modules of transformers on CUDA, decode steps in graphs: the first token that differs from
fp32 on a CPU must be a near tie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from near_ties import check_against_reference
from tiny_adapters import merged, tiny_adapter
from tiny_hf_models import TOWERS, tiny_hf_model
from tiny_media import media_logits, media_prompt, reference_media_model

from in_process_cluster import client_of, cuda_pair
from tandem.engine.adapters.adapter_files import read_adapter
from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef
from tiny_models import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (1, 5, 17, 90, 300)
NUM_TOKENS = 32
FAMILIES = ("gpt2", "opt", "gemma2", "phi3", "bloom", "mpt", "glm4_moe", "deepseek_v3", "gpt_oss", "llama4_text")


# In 16 bits a rounding sends tokens to other experts, which is no near tie of anything: there only that they run.
MIXTURES = ("glm4_moe", "deepseek_v3", "gpt_oss")


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "bfloat16") for family in FAMILIES), *((family, "float32") for family in MIXTURES)]
)
def test_greedy_against_fp32(family: str, dtype: str) -> None:
    folder = tiny_hf_model(family)
    nodes = decode, prefill = cuda_pair(folder, dtype)
    assert decode.process.loaded.replays_graphs
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        prompts = {n: random_prompt(n, seed=n) for n in LENGTHS}
        results = {}
        for length, prompt in prompts.items():
            split = client.submit(f"s{length}", prompt, sampling, decode=decode.info, prefill=prefill.info)
            alone = client.submit(f"a{length}", prompt, sampling, decode=decode.info)
            results[length] = (split, alone)
        client.wait()
        for length, prompt in prompts.items():
            for result in results[length]:
                assert result.failed is None, result.failed
                assert len(result.output()) == NUM_TOKENS
                if family not in MIXTURES or dtype == "float32":
                    check_against_reference(folder, prompt, result.output(), getattr(torch, dtype))


@pytest.mark.parametrize(("family", "targets"), [("gpt2", ("c_attn", "c_proj", "c_fc")), ("opt", ("q_proj", "fc1"))])
def test_adapters_against_merged_weights(family: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    """Decode steps in graphs, beside requests without."""
    base = tiny_hf_model(family)
    adapter = tiny_adapter(tmp_path / "adapter", base, targets=targets, scale=0.7)
    ref = AdapterRef(str(adapter), read_adapter(str(adapter)).digest)
    folders = {ref: merged(tmp_path / "merged", base, adapter), None: base}
    nodes = decode, prefill = cuda_pair(base, lora=LoraOptions(True, max_loras=2))
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with client_of(nodes) as client:
        asked = []
        for i, taken in enumerate((ref, None, ref)):
            prompt = random_prompt(17 + 60 * i, seed=i)
            split = client.submit(f"s{i}", prompt, sampling, decode=decode.info, prefill=prefill.info, adapter=taken)
            alone = client.submit(f"a{i}", prompt, sampling, decode=decode.info, adapter=taken)
            asked += [(taken, prompt, split), (taken, prompt, alone)]
        client.wait()
        for taken, prompt, result in asked:
            assert result.failed is None, result.failed
            check_against_reference(folders[taken], prompt, result.output(), torch.bfloat16)


@pytest.mark.parametrize("family", TOWERS)
def test_images_and_sounds_against_fp32(family: str) -> None:
    """Split and alone, decode steps in graphs: each token is within the rounding of the exact model's best."""
    folder = tiny_hf_model(family)
    nodes = decode, prefill = cuda_pair(folder, chunk=32)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    text = random_prompt(40, seed=1)
    prompts = [media_prompt(family, text[:5], 1, text[5:]), media_prompt(family, text, 2, text[:3], 4, text[3:9])]
    with client_of(nodes) as client:
        results = []
        for i, prompt in enumerate(prompts):
            ids, media = prompt.token_ids, prompt.media
            split = client.submit(f"s{i}", ids, sampling, decode=decode.info, prefill=prefill.info, media=media)
            alone = client.submit(f"a{i}", ids, sampling, decode=decode.info, media=media)
            results += [(prompt, split), (prompt, alone)]
        client.wait()
        for prompt, result in results:
            assert result.failed is None, result.failed
            tokens = result.output()
            exact = media_logits(reference_media_model(folder), prompt, tokens)
            rounded = media_logits(reference_media_model(folder, torch.bfloat16, "cuda"), prompt, tokens)
            gap = float((exact.max(1).values - exact.gather(1, torch.tensor(tokens)[:, None])[:, 0]).max())
            assert gap < 3 * float((exact - rounded).abs().max())
