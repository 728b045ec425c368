"""Models whose layers all slide: tokens are transformers', and no node keeps or is sent what slid out
(docs/sliding_windows.md)."""

from __future__ import annotations

from decode_trio import joined, trio
from held_blocks import most_held
from split_pair import GREEDY, SAMPLED, changed, make_pair
from tier_nodes import always_loading, until_saved

from in_process_cluster import BLOCK, Node, client_of, node_options
from tandem.engine.blocks.window import BlockWindow
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.kv_connector.protocol.outcomes import OTHER_LAYOUT
from tiny_models import check_greedy, random_prompt, tiny_model

WINDOW = BlockWindow(32, BLOCK)
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4  # layers, planes, KV heads, head size, fp32
LONG = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


def test_a_pair_hands_over_the_last_window_alone() -> None:
    """Of either block size at the sink; samples and beams fork from it; what D has of the window is not sent again."""
    model = tiny_model("mistral")
    for block_size in (BLOCK, 2 * BLOCK):
        with make_pair("local", model=model, decode={"block_size": block_size}, prefill={"chunk": 64}) as pair:
            held, prompt = most_held(pair.decode), random_prompt(700, seed=3)
            result = pair.run(prompt, LONG)
            assert result.failed is None, result.failed
            check_greedy(model, prompt, result.output(), LONG.max_tokens)
            passed = (700 - WINDOW.num_tokens + 1) // block_size * block_size
            assert pair.pushed_bytes == (700 - passed) * TOKEN_BYTES
            assert held[0] <= WINDOW.num_tokens // block_size + 2
            if block_size == BLOCK:
                pair.check_samples(prompt, changed(SAMPLED, max_tokens=30))
            pair.check_whole()


def test_sequences_run_at_once_that_would_not_fit_whole_and_come_back_from_host_memory() -> None:
    """Each would have 28 blocks at its end, and the pool has 47."""
    model, prompts = tiny_model("mistral"), [random_prompt(400, seed=seed) for seed in range(5)]
    node = always_loading(Node(node_options("unified", model, num_blocks=48, chunk=48, host_tier_bytes=16 << 20)))
    assert node.process.pool.num_blocks == 47, "one is the null block's"
    held = most_held(node)
    with client_of([node]) as client:
        with node.holding_until_accepted(client):
            results = [client.submit(f"at once {i}", prompts[i], LONG, decode=node.info) for i in range(3)]
        client.wait()
        assert WINDOW.most_held(48) < held[0] <= 3 * WINDOW.most_held(48)
        for index in (3, 4, 3):
            results.append(client.submit(f"alone {len(results)}", prompts[index], LONG, decode=node.info))
            client.wait()
            until_saved(node)
        for index, result in zip((0, 1, 2, 3, 4, 3), results, strict=True):
            assert result.failed is None, result.failed
            check_greedy(model, prompts[index], result.output(), LONG.max_tokens)
        assert node.process.tiers is not None
        assert node.process.tiers.manager.counts()["tier_host_hits"] > 0


def test_a_sequence_moves_without_what_slid_out() -> None:
    model, prompt = tiny_model("mistral"), random_prompt(300, seed=5)
    guessing = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
    with trio("local", model=model, speculative_config=guessing) as nodes:
        result, moved = nodes.move_one("r", prompt, changed(GREEDY, max_tokens=80))
        assert moved.failed is None, moved.failed
        assert [message.reason for message in result.migrated] == [""]
        check_greedy(model, prompt, joined(result, moved), 80)
        pushed = nodes.first.process.transfer.counters["kv_pushed_bytes"]
        assert 0 < pushed < 300 * TOKEN_BYTES, "what slid out was sent"
        nodes.check_whole()


def test_a_sequence_stays_where_what_is_left_begins_within_the_others_block() -> None:
    model, prompt, sampling = tiny_model("mistral"), random_prompt(330, seed=6), changed(GREEDY, max_tokens=80)
    with trio("local", model=model, second={"block_size": 64}) as nodes:
        nodes.first.hold_after(10)  # it has given back 288 tokens, or 304
        result = nodes.submit("r", prompt, sampling)
        nodes.until_decoding(result)
        nodes.migrate(result, prompt, sampling)
        nodes.until(lambda: bool(result.migrated))
        assert [message.reason for message in result.migrated] == [OTHER_LAYOUT]
        nodes.first.go_on()
        nodes.client.wait(result)
        check_greedy(model, prompt, result.output(), sampling.max_tokens)
        nodes.check_whole()
