"""Models of which some layers slide and others see everything: tokens are transformers', and no node keeps or is sent
what slid out of those that slide (docs/sliding_windows.md#layers-of-both-kinds)."""

from __future__ import annotations

import pytest
from decode_trio import joined, trio
from held_blocks import most_held
from node_child import NodeChild
from pull_nodes import make_nodes
from split_pair import GREEDY, SAMPLED, changed, make_pair
from tier_nodes import always_loading, until_saved
from tiny_hf_models import tiny_hf_model

from in_process_cluster import BLOCK, Client, Node, client_of, node_options
from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import check_greedy, random_prompt, tiny_model

MODEL = "qwen2_hybrid"  # four layers, of which one sees everything
WINDOW, NUM_FULL, NUM_SLIDING = BlockWindow(32, BLOCK), 1, 3
TOKEN_BYTES = 2 * 2 * 16 * 4  # of a layer: planes, KV heads, head size, fp32
LONG = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


def bytes_of(num_tokens: int) -> int:
    """What a hand-off of so many tokens moves at least."""
    slid_out = WINDOW.num_passed(num_tokens) * BLOCK
    return (num_tokens * NUM_FULL + (num_tokens - slid_out) * NUM_SLIDING) * TOKEN_BYTES


# README says: "Layers that look back a window of tokens keep and hand over that window alone"
@pytest.mark.parametrize("way", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_pair_hands_over_the_last_window_of_layers_that_slide(way: str) -> None:
    model, prompt = tiny_model(MODEL), random_prompt(700, seed=3)
    with make_pair(way, model=model, prefill={"chunk": 64}) as pair:
        held = most_held(pair.decode)
        result = pair.run(prompt, LONG)
        assert result.failed is None, result.failed
        check_greedy(model, prompt, result.output(), LONG.max_tokens)
        assert pair.pushed_bytes == bytes_of(700)
        assert held[0] <= -(-(700 + LONG.max_tokens) // BLOCK) + NUM_SLIDING * (WINDOW.num_tokens // BLOCK + 2)
        again = pair.run(prompt + result.output() + random_prompt(90, seed=4), LONG)
        assert again.failed is None, again.failed
        assert again.num_cached_tokens > 700
        check_greedy(model, prompt + result.output() + random_prompt(90, seed=4), again.output(), LONG.max_tokens)
        pair.check_samples(prompt, changed(SAMPLED, max_tokens=30))
        pair.check_whole()


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text", "gpt_oss", "cohere2", "llama4_text"])
def test_families_that_transformers_computes(kind: str) -> None:
    model, prompt = tiny_hf_model(kind), random_prompt(150, seed=1)
    with make_pair("local", model=model, prefill={"chunk": 64}) as pair:
        assert pair.decode.process.pool.windows.num_each > 0
        result = pair.run(prompt, GREEDY)
        for each in (result, pair.run_alone(prompt, GREEDY)):
            assert each.failed is None, each.failed
            check_greedy(model, prompt, each.output(), GREEDY.max_tokens)
        layout = pair.decode.process.loaded.layout
        whole = 150 * layout.group.blocks_each * layout.payload_bytes // BLOCK
        assert 0 < pair.pushed_bytes < whole
        pair.check_whole()


def test_sequences_run_at_once_that_would_not_fit_whole_and_come_back_from_host_memory() -> None:
    """Each would take 112 of the pool's 239 blocks if nothing were given back."""
    model, prompts = tiny_model(MODEL), [random_prompt(400, seed=seed) for seed in range(5)]
    node = always_loading(Node(node_options("unified", model, num_blocks=60, chunk=48, host_tier_bytes=16 << 20)))
    assert node.process.pool.num_blocks == 4 * 60 - 1, "one is the null block's"
    held = most_held(node)
    with client_of([node]) as client:
        with node.holding_until_accepted(client):
            results = [client.submit(f"at once {i}", prompts[i], LONG, decode=node.info) for i in range(4)]
        client.wait()
        assert held[0] <= 4 * (28 + NUM_SLIDING * WINDOW.most_held(48))
        assert node.process.logic.scheduler.state.num_preemptions == 0
        until_saved(node)
        for index in (4, 0, 1, 2, 3, 4, 0):
            results.append(client.submit(f"alone {len(results)}", prompts[index], LONG, decode=node.info))
            client.wait()
            until_saved(node)
        for index, result in zip((0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0), results, strict=True):
            assert result.failed is None, result.failed
            check_greedy(model, prompts[index], result.output(), LONG.max_tokens)
        assert node.process.tiers is not None
        assert node.process.tiers.manager.counts()["tier_host_hits"] > 0
        assert node.process.logic.scheduler.state.num_cached_tokens >= 3 * 384


def test_a_prefix_is_pulled_with_its_last_window() -> None:
    prompt = random_prompt(20 * BLOCK + 3, seed=5)
    with make_nodes("unified", "unified", transport="shm", model=MODEL) as nodes:
        nodes.ask(prompt, on=0)
        nodes.ask(prompt, on=1, holder=0)
        assert nodes.count(1, "pull_tokens") == 20 * BLOCK
        moved = nodes.nodes[0].process.transfer.counters["kv_pushed_bytes"]
        assert moved == bytes_of(20 * BLOCK)
        longer = prompt + random_prompt(3 * BLOCK, seed=6)
        nodes.ask(longer, on=1)
        nodes.ask(longer, on=0, holder=1)
        assert nodes.count(0, "pull_tokens") == 3 * BLOCK


def test_a_sequence_moves_without_what_slid_out() -> None:
    model, prompt = tiny_model(MODEL), random_prompt(300, seed=5)
    guessing = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    with trio("local", model=model, speculative_config=guessing) as nodes:
        result, moved = nodes.move_one("r", prompt, changed(GREEDY, max_tokens=80))
        assert moved.failed is None, moved.failed
        assert [message.reason for message in result.migrated] == [""]
        check_greedy(model, prompt, joined(result, moved), 80)
        pushed = nodes.first.process.transfer.counters["kv_pushed_bytes"]
        assert 300 * NUM_FULL * TOKEN_BYTES < pushed < 2 * 300 * TOKEN_BYTES, "what slid out was sent"
        nodes.check_whole()


def test_ranks_keep_windows_apart_as_one_process_does() -> None:
    model, prompt = tiny_model(MODEL), random_prompt(300, seed=7)
    child = NodeChild(("prefill",), "shm", num_ranks=2, model=MODEL)
    node = Node(node_options("decode", model, transport="shm", chunk=64))
    try:
        client = Client(node.info, child.infos[0])
        result = client.submit("r", prompt, LONG, decode=node.info, prefill=child.infos[0])
        client.wait()
        assert result.failed is None, result.failed
        check_greedy(model, prompt, result.output(), LONG.max_tokens)
        client.close()
    finally:
        node.stop()
        child.stop()


def test_kept_together_where_that_is_asked_for() -> None:
    model, prompt = tiny_model(MODEL), random_prompt(200, seed=8)
    node = Node(node_options("unified", model, num_blocks=60, hybrid_kv=False))
    assert node.process.pool.windows.num_each == 0
    with client_of([node]) as client:
        result = client.submit("r", prompt, LONG, decode=node.info)
        client.wait()
        check_greedy(model, prompt, result.output(), LONG.max_tokens)
