"""Models that keep latents: what is handed over, cached, evicted and given up is one row a token and layer."""

from __future__ import annotations

from split_pair import make_pair
from tier_nodes import always_loading, until_saved
from tiny_hf_models import MLA, tiny_hf_model

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import check_greedy, random_prompt

SAMPLING = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
TOKEN_BYTES = MLA["num_hidden_layers"] * (MLA["kv_lora_rank"] + MLA["qk_rope_head_dim"]) * 4


def test_a_pair_hands_over_rows_of_latents_and_finds_them_again() -> None:
    """Blocks of both are unlike, prompts come in chunks."""
    folder = tiny_hf_model("deepseek_v3")
    prefix = random_prompt(112, seed=5)  # 7 blocks of 16, 3 of 32
    with make_pair("shm", model=folder, decode={"block_size": 32}, prefill={"chunk": 48}) as pair:
        layout = pair.prefill.info.layout
        assert layout is not None
        assert layout.payload_bytes == 16 * TOKEN_BYTES
        for tail, cached in ((7, 0), (40, 96)):
            prompt, pushed = prefix + random_prompt(tail, seed=tail), pair.pushed_bytes
            result = pair.run(prompt, SAMPLING)
            assert result.failed is None, result.failed
            assert result.num_cached_tokens == cached
            assert pair.pushed_bytes - pushed == (len(prompt) - cached) * TOKEN_BYTES
            check_greedy(folder, prompt, result.output(), SAMPLING.max_tokens)
        pair.check_whole()


def test_requests_that_give_way_and_prompts_that_were_evicted_go_on() -> None:
    folder, prompts = tiny_hf_model("deepseek_v2"), [random_prompt(70, seed=seed) for seed in range(4)]
    node = always_loading(Node(node_options("unified", folder, num_blocks=20, host_tier_bytes=4 << 20)))
    with client_of([node]) as client:
        for turn in range(2):
            with node.holding_until_accepted(client):
                results = [
                    client.submit(f"{turn}-{index}", prompt, SAMPLING, decode=node.info)
                    for index, prompt in enumerate(prompts)
                ]
            client.wait()
            until_saved(node)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.failed is None, result.failed
                check_greedy(folder, prompt, result.output(), SAMPLING.max_tokens)
        assert node.process.logic.scheduler.state.num_preemptions > 0, "the small pool forced no preemption"
        assert node.process.tiers is not None
        assert node.process.tiers.manager.counts()["tier_host_hits"] > 0, "nothing was evicted"
