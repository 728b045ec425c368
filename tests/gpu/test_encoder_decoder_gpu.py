"""Models with an encoder on CUDA, decode steps in graphs: where a greedy token is not that of fp32 on a CPU, it must
have been a near tie."""

from __future__ import annotations

import pytest
import torch
from tiny_encoder_models import audio_input, reference, sequence, text_input, tiny_encoder_model

from in_process_cluster import client_of, cuda_pair
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.media import MediaItem
from tiny_models import random_prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = (1, 17, 64, 130)
NUM_TOKENS = 24


def gaps(model: torch.nn.Module, item: MediaItem, begin: tuple[int, ...], tokens: list[int]) -> torch.Tensor:
    """Logits [tokens, vocabulary] for each token after those before it."""
    weight = next(model.parameters())
    arguments = {name: torch.from_numpy(array.copy()).to(weight.device) for name, array in item.arrays().items()}
    arguments = {name: each.to(weight.dtype) if each.is_floating_point() else each for name, each in arguments.items()}
    ids = torch.tensor([[*begin, *tokens[:-1]]], device=weight.device)
    with torch.inference_mode():
        return model(**arguments, decoder_input_ids=ids).logits[0, len(begin) - 1 :].float().cpu()


@pytest.mark.parametrize("family", ["bart", "pegasus", "whisper"])
def test_greedy_against_fp32(family: str) -> None:
    folder = tiny_encoder_model(family)
    nodes = decode, prefill = cuda_pair(folder)
    assert decode.process.loaded.replays_graphs
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    facts = decode.info.encoder
    assert facts is not None
    texts = [text_input(random_prompt(length, seed=length)) for length in LENGTHS]
    items = [audio_input(seed) for seed in range(3)] if family == "whisper" else texts
    exact = reference(folder)
    rounded = type(exact)(exact.config).to(torch.bfloat16)
    rounded.load_state_dict(exact.state_dict())
    rounded = rounded.to("cuda").eval()
    with client_of(nodes) as client:
        results = {}
        for index, item in enumerate(items):
            prompt = sequence(item, facts)
            split = client.submit(
                f"s{index}", prompt, sampling, decode=decode.info, prefill=prefill.info, media=(item,)
            )
            results[index] = split, client.submit(f"a{index}", prompt, sampling, decode=decode.info, media=(item,))
        client.wait()
        for index, item in enumerate(items):
            for result in results[index]:
                assert result.failed is None, result.failed
                tokens = result.output()
                logits = gaps(exact, item, facts.prompt, tokens)
                error = float((logits - gaps(rounded, item, facts.prompt, tokens)).abs().max())
                gap = logits.max(1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
                assert float(gap.max()) < 3 * error, f"input {index}: {gap.tolist()} beside an error of {error:.4f}"
