"""What guesses beside models of which some layers slide and others see everything: no output changes, window blocks are
given back as without it, and a head's keys lie with those of the layers that see everything."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from eagle_heads import knowing_head, random_head, walking_model
from held_blocks import most_held
from mtp_heads import random_mtp
from pull_nodes import make_nodes
from quantised_checkpoints import mxfp4_folders
from served_head import ONE_AND_SPLIT, check_knowing, check_knowing_on_ranks, check_moved, nodes_of
from split_pair import GREEDY, SAMPLED, changed, make_pair
from tier_nodes import always_loading, until_saved
from tiny_hf_models import tiny_hf_model

from in_process_cluster import BLOCK, Node, client_of, node_options
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.kv_layout import LayerPlace
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import VOCAB, check_greedy, random_prompt, tiny_model

LENGTHS = (1, 17, 90, 300)
DRAWN = changed(SAMPLED, max_tokens=30)
LONG = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Family:
    """A served model, and the one that transformers reads; how many layers a block has with a head's, and how many
    window blocks."""

    served: Path
    plain: Path
    num_layers: int
    num_windows: int
    window: int


def qwen2(folder: Path) -> Family:
    """As Gemma-3 has many layers that slide to one that doesn't: here three."""
    model = tiny_model("qwen2_hybrid")
    return Family(model, model, num_layers=2, num_windows=2, window=32)


def gpt_oss(folder: Path) -> Family:
    """Two of each kind: with the head's, more see everything than slide."""
    served, plain = mxfp4_folders(tiny_hf_model("gpt_oss"), folder)
    return Family(served, plain, num_layers=3, num_windows=1, window=21)


def mimo(folder: Path) -> Family:
    """One layer of three sees everything, and so does the head, which is like the first."""
    checkpoint = random_mtp(folder, "mimo")
    slides = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    checkpoint.configure(**slides)
    path = checkpoint.plain / "config.json"
    types = ["full_attention", *["sliding_attention"] * 2]
    path.write_text(json.dumps(json.loads(path.read_text()) | slides | {"layer_types": types}))
    return Family(checkpoint.served, checkpoint.plain, num_layers=2, num_windows=1, window=32)


def eagle(folder: Path, features: tuple[int, ...] = (1, 2, 3)) -> str:
    """A head of random weights for tiny models of all families."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "vocab_size": VOCAB, "draft_vocab_size": VOCAB // 4}
    head = random_head(folder, **sizes, eagle_config={"eagle_aux_hidden_state_layer_ids": features})
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 4})


def mtp(folder: Path) -> str:
    return json.dumps({"method": "mtp", "num_speculative_tokens": 3})


def check_apart(node: Node, family: Family) -> None:
    """The node keeps layers apart, and the head's in the block."""
    group, pool = node.process.loaded.layout.group, node.process.pool
    assert (group.num_layers, group.num_windows) == (family.num_layers, family.num_windows)
    assert group.places[-1] == LayerPlace(0, family.num_layers - 1)
    assert pool.windows.num_each == family.num_windows
    assert pool.window.num_tokens == family.window


def drawn_of(family: Family, roles: list[str], config: str) -> dict[int, list[int]]:
    """Three samples of a prompt beyond the window."""
    nodes, where = nodes_of(roles, lambda role: node_options(role, family.served, speculative_config=config, chunk=64))
    with client_of(nodes) as client:
        result = client.submit("drawn", random_prompt(150, seed=9), DRAWN, samples=(0, 1, 2), **where)
        client.wait(result)
        assert result.failed is None, result.failed
        return {sample: result.output(sample) for sample in (0, 1, 2)}


FAMILIES = [(qwen2, eagle), (gpt_oss, eagle), (mimo, mtp)]


@pytest.mark.parametrize("roles", ONE_AND_SPLIT, ids=["one", "split"])
@pytest.mark.parametrize(("make", "guesser"), FAMILIES, ids=["qwen2", "gpt_oss", "mimo"])
def test_a_head_beside_window_blocks_changes_no_output(
    make: Callable[[Path], Family], guesser: Callable[[Path], str], roles: list[str], tmp_path: Path
) -> None:
    """Greedy tokens are transformers', drawn ones and those of forks are a node's without a head. Then a prompt that
    begins as another has ended."""
    family, config = make(tmp_path), guesser(tmp_path / "head")
    nodes, where = nodes_of(roles, lambda role: node_options(role, family.served, speculative_config=config, chunk=64))
    with client_of(nodes) as client:
        for node in nodes:
            check_apart(node, family)
        prompts = [random_prompt(length, seed=length) for length in LENGTHS]
        asked = [client.submit(f"{len(each)}", each, GREEDY, **where) for each in prompts]
        drawn = client.submit("drawn", random_prompt(150, seed=9), DRAWN, samples=(0, 1, 2), **where)
        client.wait()
        for prompt, result in zip(prompts, asked, strict=True):
            assert result.failed is None, result.failed
            check_greedy(family.plain, prompt, result.output(), GREEDY.max_tokens)
        longer = prompts[-1] + asked[-1].output() + random_prompt(40, seed=2)
        again = client.submit("again", longer, GREEDY, **where)
        client.wait(again)
        assert again.failed is None, again.failed
        assert max(again.num_cached_tokens, again.num_reused_tokens) >= 300
        check_greedy(family.plain, longer, again.output(), GREEDY.max_tokens)
        counters = nodes[0].process.logic.scheduler.spec_counters
        assert counters["spec_draft_tokens"] > counters["spec_accepted_tokens"]
        assert counters["spec_draft_tokens"] > 50
        seen = {sample: drawn.output(sample) for sample in (0, 1, 2)}
        for node in nodes:
            node.wait_until_whole()
    assert seen == drawn_of(family, ["unified"], "")


@pytest.mark.parametrize(("make", "guesser"), FAMILIES, ids=["qwen2", "gpt_oss", "mimo"])
def test_what_slid_out_is_given_back_while_guesses_are_checked(
    make: Callable[[Path], Family], guesser: Callable[[Path], str], tmp_path: Path
) -> None:
    """On both sides of a hand-over: the decode node never holds more window blocks than those of one window."""
    family, config = make(tmp_path), guesser(tmp_path / "head")
    options = {"speculative_config": config}
    with make_pair("shm", model=family.served, decode=options, prefill={**options, "chunk": 64}) as pair:
        held, prompt = most_held(pair.decode), random_prompt(700, seed=3)
        result = pair.run(prompt, LONG)
        assert result.failed is None, result.failed
        check_greedy(family.plain, prompt, result.output(), LONG.max_tokens)
        num_blocks = -(-(700 + LONG.max_tokens) // BLOCK)
        assert num_blocks <= held[0] <= num_blocks + family.num_windows * (family.window // BLOCK + 3)
        layout = pair.decode.process.loaded.layout
        num_bare = BlockWindow(family.window, BLOCK).num_passed(700)
        token_bytes = layout.payload_bytes // BLOCK
        assert pair.pushed_bytes == token_bytes * (700 + family.num_windows * (700 - num_bare * BLOCK))
        assert pair.decode.process.logic.scheduler.spec_counters["spec_draft_tokens"] > 10
        pair.check_whole()


@pytest.mark.parametrize("caching", [pytest.param(False, marks=pytest.mark.slow), True])
def test_with_too_few_blocks_sequences_are_preempted_and_come_back(caching: bool, tmp_path: Path) -> None:
    family = qwen2(tmp_path)
    options = {"num_blocks": 28, "chunk": 48, "caching": caching}
    config = eagle(tmp_path / "head")
    prompts = [random_prompt(200, seed=seed) for seed in range(4)]
    sampling = changed(LONG, max_tokens=200)
    node = Node(node_options("unified", family.served, speculative_config=config, **options))
    with client_of([node]) as client:
        with node.holding_until_accepted(client):
            asked = [
                client.submit(f"{index}", prompt, sampling, decode=node.info) for index, prompt in enumerate(prompts)
            ]
        client.wait()
        assert node.process.logic.scheduler.state.num_preemptions > 0
        for prompt, result in zip(prompts, asked, strict=True):
            assert result.failed is None, result.failed
            check_greedy(family.plain, prompt, result.output(), sampling.max_tokens)


def test_where_all_layers_slide_a_head_has_everything_kept(tmp_path: Path) -> None:
    model, prompt = tiny_model("mistral"), random_prompt(200, seed=6)
    config = eagle(tmp_path / "head", features=(0, 1, 2))
    node = Node(node_options("unified", model, speculative_config=config))
    assert (node.process.pool.window, node.process.pool.windows.num_each) == (NO_WINDOW, 0)
    with client_of([node]) as client:
        held = most_held(node)
        result = client.submit("r", prompt, LONG, decode=node.info)
        client.wait(result)
        check_greedy(model, prompt, result.output(), LONG.max_tokens)
        assert held[0] >= 200 // BLOCK


# --- where a head's keys are --------------------------------------------------------------------------------


def keys_of_head(node: Node) -> dict[bytes, torch.Tensor]:
    """What the head's layer has in each cached block."""
    pool, process = node.process.pool, node.process
    layer = process.loaded.layout.group.places[-1].layer if pool.windows.num_each else -1
    found = {each: pool.find(each) for each in node.cached_hashes()}
    return {each: process.runner.pool[block, :, layer].clone() for each, block in found.items() if block is not None}


def check_keys(kept: dict[bytes, torch.Tensor], expected: dict[bytes, torch.Tensor], num_least: int) -> None:
    common = kept.keys() & expected.keys()
    assert len(common) >= num_least
    for each in common:
        assert expected[each][..., 1:, :].abs().sum() > 0
        torch.testing.assert_close(kept[each][..., 1:, :], expected[each][..., 1:, :], rtol=1e-4, atol=1e-4)


def test_keys_of_a_head_are_those_that_it_has_where_layers_are_kept_together(tmp_path: Path) -> None:
    """Of prompts and outputs: computed here, handed over, pulled, and come back from host memory. Whole blocks come, so
    that only first entries of blocks may lack their feature."""
    family, config = qwen2(tmp_path), eagle(tmp_path / "head")
    prompt = random_prompt(21 * BLOCK, seed=5)
    together = Node(node_options("unified", family.served, speculative_config=config, hybrid_kv=False))
    with client_of([together]) as client:
        assert together.process.pool.windows.num_each == 0
        result = client.submit("r", prompt, LONG, decode=together.info)
        client.wait()
        output = result.output()
        expected = keys_of_head(together)
    options = {"speculative_config": config, "chunk": 64}
    with make_pair("shm", model=family.served, decode=options, prefill=options) as pair:
        assert pair.run(prompt, LONG).output() == output
        check_keys(keys_of_head(pair.decode), expected, num_least=22)
        check_keys(keys_of_head(pair.prefill), expected, num_least=20)
    with make_nodes("unified", "unified", transport="shm", model="qwen2_hybrid", **options) as nodes:
        nodes.ask(prompt, on=0)
        nodes.ask(prompt, on=1, holder=0)
        assert nodes.count(1, "pull_tokens") == 20 * BLOCK
        check_keys(keys_of_head(nodes.nodes[1]), expected, num_least=20)
    tiered = {**options, "num_blocks": 30, "host_tier_bytes": 16 << 20}
    node = always_loading(Node(node_options("unified", family.served, **tiered)))
    others = [random_prompt(400, seed=seed) for seed in range(3)]
    with client_of([node]) as client:
        for index, each in enumerate((prompt, *others, prompt)):
            result = client.submit(f"{index}", each, LONG, decode=node.info)
            client.wait()
            until_saved(node)
        assert result.output() == output
        assert node.process.tiers is not None
        assert node.process.tiers.manager.counts()["tier_host_hits"] > 0
        check_keys(keys_of_head(node), expected, num_least=20)


@pytest.mark.parametrize("roles", ONE_AND_SPLIT, ids=["one", "split"])
def test_a_head_that_knows_the_model_is_right(roles: list[str], tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model", apart=True), knowing(tmp_path)
    nodes, where = nodes_of(roles, lambda role: node_options(role, model, speculative_config=config, chunk=32))
    assert [node.process.pool.windows.num_each for node in nodes] == [2] * len(roles)
    check_knowing(nodes, where, most_steps=30)


def test_a_stream_that_moves_takes_the_heads_keys_along(tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model", apart=True), knowing(tmp_path)
    check_moved(lambda role: node_options(role, model, speculative_config=config))


@pytest.mark.slow  # as test_eagle.py asks of layers kept together
def test_ranks_share_a_head_out(tmp_path: Path) -> None:
    check_knowing_on_ranks(
        {"prefill": 1, "decode": 2}, walking_model(tmp_path / "model", apart=True), knowing(tmp_path)
    )


def knowing(folder: Path) -> str:
    head = knowing_head(folder / "head")
    return json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 4})


# --- a draft model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [pytest.param(256, marks=pytest.mark.slow), 40])
def test_a_draft_model_beside_window_blocks_is_right_where_it_is_the_model(num_blocks: int, tmp_path: Path) -> None:
    """Its twins are those of blocks. The prefill node knows of no draft model, and keeps layers apart alike."""
    model = tiny_model("qwen2_hybrid")
    config = json.dumps({"method": "draft_model", "model": str(model), "num_speculative_tokens": 4})
    decode = {"speculative_config": config, "num_blocks": num_blocks}
    prompts = [random_prompt(200, seed=seed) for seed in range(4)]
    sampling = changed(LONG, max_tokens=120)
    with make_pair("shm", model=model, decode=decode, prefill={"chunk": 64}) as pair:
        assert pair.decode.process.pool.windows.num_each == 3
        held = most_held(pair.decode)
        with pair.decode.holding_until_accepted(pair.client) if num_blocks < 256 else nullcontext():
            asked = [pair.submit(prompt, sampling) for prompt in prompts]
        pair.client.wait()
        for prompt, result in zip(prompts, asked, strict=True):
            assert result.failed is None, result.failed
            check_greedy(model, prompt, result.output(), sampling.max_tokens)
        scheduler = pair.decode.process.logic.scheduler
        counters = scheduler.spec_counters
        assert counters["spec_accepted_tokens"] >= 0.9 * counters["spec_draft_tokens"] > 200
        assert held[0] <= 4 * (20 + 3 * 6)
        pair.check_samples(random_prompt(150, seed=9), DRAWN)
        pair.check_whole()
