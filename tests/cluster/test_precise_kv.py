"""Requests whose keys or values fp8 can't hold go on with 16-bit KV: their tokens are those of a node without fp8."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from eagle_heads import TINY_HEAD, random_head
from router_in_thread import RouterInThread
from safetensors.torch import load_file, save_file
from split_pair import GREEDY, make_pair

from in_process_cluster import Node, node_options
from tiny_models import made_once, random_prompt, reference_greedy, tiny_model

LARGER = 2.0**12  # a power of two: it changes no bit of the mantissas of what is computed in fp32
FP8 = {"kv_cache_dtype": "fp8_e4m3", "precise_kv_tokens": 1024}
NUM_TOKENS = 24
PROMPTS = [random_prompt(length, seed=700 + length) for length in (9, 40, 75)]


def model_with_large_values() -> Path:
    """The tiny llama with values LARGER times as large in its second layer, which the next product takes back."""
    small = tiny_model("llama")

    def build(folder: Path) -> None:
        shutil.copytree(small, folder, dirs_exist_ok=True)
        weights = load_file(small / "model.safetensors")
        attention = "model.layers.1.self_attn"
        weights[f"{attention}.v_proj.weight"] *= LARGER
        weights[f"{attention}.o_proj.weight"] /= LARGER
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})

    return made_once(small.parent / "llama-large-values", build)


@pytest.mark.parametrize(
    ("roles", "is_headed"),
    [(("unified",), False), (("prefill", "decode"), False), (("unified",), True)],
    ids=["single", "split", "headed"],
)
def test_tokens_are_those_of_16_bits(roles: tuple[str, ...], is_headed: bool, tmp_path: Path) -> None:
    """Also beside a head that guesses, which the precise engine has not."""
    folder, more = model_with_large_values(), {}
    if is_headed:
        features = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
        head = str(random_head(tmp_path, **TINY_HEAD | {"eagle_config": features}))
        more = {"speculative_config": json.dumps({"method": "eagle3", "model": head, "num_speculative_tokens": 2})}
    nodes = [Node(node_options(role, folder, **FP8, **more)) for role in roles]
    addresses = tuple(node.info.control_address for node in nodes)
    asked = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with RouterInThread(folder, addresses, local_tail_tokens=0) as router:
        router.wait_ready()
        for prompt in PROMPTS:
            body = {**asked, "prompt": prompt, "max_tokens": NUM_TOKENS}
            answer = router.client.post("/v1/completions", json=body).json()
            assert answer["choices"][0]["token_ids"] == reference_greedy(folder, prompt, NUM_TOKENS).token_ids
        for name in ("kv_overflow_requests", "precise_kv_requests"):
            counts = [node.process.logic.counters()[name] for node in nodes]
            assert sum(counts) == len(PROMPTS), "each request is counted once"
        too_long = router.client.post("/v1/completions", json={**asked, "prompt": PROMPTS[0], "max_tokens": 1500})
        assert too_long.status_code >= 500
        assert "--precise-kv-tokens" in too_long.text
        router.wait_idle()
    for node in nodes:
        node.wait_until_whole()
        node.stop()


def test_what_overflows_on_its_way_is_never_committed() -> None:
    folder, prompt = model_with_large_values(), PROMPTS[1]
    expected = reference_greedy(folder, prompt, GREEDY.max_tokens).token_ids
    with make_pair("tcp", model=folder, decode={"kv_cache_dtype": "fp8_e4m3", "precise_kv_tokens": 256}) as pair:
        result = pair.run(prompt, GREEDY)
        assert result.failed is not None
        assert (result.failed.code, result.failed.retryable) == ("kv_overflow", True)
        assert result.output() == expected[: len(result.output())], "at most the first token, made of exact KV"
        assert not pair.sink.commits
        again = pair.client.submit("again", prompt, GREEDY, decode=pair.decode.info, is_precise=True)
        pair.client.wait(again)
        assert again.output() == expected
        pair.check_whole()
