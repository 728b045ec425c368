"""A layer that guesses from the model's own checkpoint: no output changes, and one that knows its model is right
wherever KV came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_heads import DEMO
from mtp_heads import FAMILIES, MtpCheckpoint, knowing_mtp, random_mtp
from quantised_checkpoints import quantised_folders
from served_head import (
    GREEDY,
    ONE_AND_SPLIT,
    check_adapters,
    check_knowing,
    check_knowing_on_ranks,
    check_moved,
    nodes_of,
)
from split_pair import SAMPLED, changed
from tiny_adapters import ALL

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.node.setup import load
from tiny_models import check_greedy, random_prompt

FEW_BLOCKS = {"num_blocks": 30, "caching": False}


def guessing(count: int = 3, method: str = "mtp") -> str:
    return json.dumps({"method": method, "num_speculative_tokens": count})


def of_roles(roles: list[str], model: Path, **options: object) -> tuple[list[Node], dict]:
    return nodes_of(roles, lambda role: node_options(role, model, **options))


@pytest.mark.parametrize("family", ["deepseek_v3", pytest.param("mimo", marks=pytest.mark.slow), "glm4_moe"])
@pytest.mark.parametrize("roles", ONE_AND_SPLIT, ids=["one", "split"])
def test_a_head_that_knows_the_model_is_right(roles: list[str], family: str, tmp_path: Path) -> None:
    nodes, where = of_roles(roles, knowing_mtp(tmp_path, family).served, speculative_config=guessing(), chunk=32)
    check_knowing(nodes, where, most_steps=35)


@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_a_head_that_knows_the_model_is_right_over_kv_of_fp8(family: str, tmp_path: Path) -> None:
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "chunk": 32}
    nodes, where = of_roles(
        ["decode", "prefill"], knowing_mtp(tmp_path, family).served, speculative_config=guessing(), **fp8
    )
    check_knowing(nodes, where, most_steps=35)


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("deepseek_v3", {"prefill": 2, "decode": 2}),
        ("mimo", {"prefill": 1, "decode": 2}),
        ("deepseek_v3", {"unified": 2}),
        ("glm4_moe", {"unified": 2}),
        ("glm4_moe", {"prefill": 1, "decode": 2}),
    ],
    ids=str,
)
@pytest.mark.slow  # as test_eagle.py asks of another head
def test_ranks_share_a_head_out(family: str, ranks: dict[str, int], tmp_path: Path) -> None:
    check_knowing_on_ranks(ranks, knowing_mtp(tmp_path, family).served, guessing())


@pytest.mark.parametrize(
    ("family", "roles", "options"),
    [
        ("mimo", ["unified"], FEW_BLOCKS),
        pytest.param("deepseek_v3", ["unified"], FEW_BLOCKS, marks=pytest.mark.slow),
        pytest.param("mimo", ["decode", "prefill"], {"chunk": 32}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", ["decode", "prefill"], {"chunk": 32}, marks=pytest.mark.slow),
        pytest.param("glm4_moe", ["unified"], FEW_BLOCKS, marks=pytest.mark.slow),
        ("glm4_moe", ["decode", "prefill"], {"chunk": 32}),
    ],
    ids=["mimo-one", "deepseek-one", "mimo-split", "deepseek-split", "glm-one", "glm-split"],
)
def test_a_head_of_random_weights_changes_no_output(
    family: str, roles: list[str], options: dict[str, object], tmp_path: Path
) -> None:
    """On one node with too few blocks; and split, where what it keeps is handed over beside the model's. Greedy tokens
    are transformers', drawn ones those of a node without; that node passes the head's weights over."""
    checkpoint = random_mtp(tmp_path, family)
    prompts, drawn = [random_prompt(70, seed=seed) for seed in range(4)], changed(SAMPLED, max_tokens=60)
    outputs, counters = [], {}
    for config in ("", guessing()):
        nodes, where = of_roles(roles, checkpoint.served, speculative_config=config, **options)
        with client_of(nodes) as client:
            with nodes[0].holding_until_accepted(client) if "num_blocks" in options else nullcontext():
                greedy = [client.submit(f"g{index}", prompt, GREEDY, **where) for index, prompt in enumerate(prompts)]
                sampled = client.submit("drawn", prompts[0], drawn, **where)
            client.wait()
            assert [each.failed for each in (*greedy, sampled)] == [None] * 5
            for prompt, result in zip(prompts, greedy, strict=True):
                check_greedy(checkpoint.plain, prompt, result.output(), GREEDY.max_tokens)
            outputs.append(sampled.output())
            scheduler = nodes[0].process.logic.scheduler
            counters = scheduler.spec_counters
            assert scheduler.state.num_preemptions > 0 or "num_blocks" not in options
    assert outputs[0] == outputs[1]
    assert counters["spec_accepted_tokens"] < 0.3 * counters["spec_draft_tokens"]
    assert counters["spec_draft_tokens"] > 20


@pytest.mark.parametrize(
    "family", ["deepseek_v3", *(pytest.param(one, marks=pytest.mark.slow) for one in FAMILIES[1:])]
)
def test_a_stream_that_moves_takes_what_its_head_keeps_along(family: str, tmp_path: Path) -> None:
    model = knowing_mtp(tmp_path, family).served
    check_moved(lambda role: node_options(role, model, speculative_config=guessing()))


@pytest.mark.parametrize(
    ("family", "targets"),
    [("mimo", ALL), pytest.param("glm4_moe", ("q_proj", "o_proj"), marks=pytest.mark.slow)],  # its experts take none
    ids=["mimo", "glm"],
)
def test_adapters_and_log_probabilities_of_prompts_stay_what_they_are(
    family: str, targets: Sequence[str], tmp_path: Path
) -> None:
    checkpoint, prompt = random_mtp(tmp_path, family), random_prompt(50, seed=1)
    check_adapters(checkpoint.served, checkpoint.plain, guessing(), prompt, tmp_path / "adapter", targets)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_is_one_more_layer_and_part_of_the_identity(family: str, tmp_path: Path) -> None:
    checkpoint = random_mtp(tmp_path, family)
    plain, one, former = (
        load(node_options("prefill", checkpoint.served, speculative_config=config))
        for config in ("", guessing(), guessing(method="deepseek_mtp"))
    )
    assert len({loaded.identity.key() for loaded in (plain, one)}) == 2
    assert former.identity.key() == one.identity.key()
    assert one.layout.group.num_layers == plain.layout.group.num_layers + 1
    assert one.layout.group.kind == plain.layout.group.kind == ("latent" if family == "deepseek_v3" else "full")
    checkpoint.rewrite({f"{checkpoint.prefix}input_layernorm.weight": torch.ones(64)})
    other = load(node_options("prefill", checkpoint.served, speculative_config=guessing()))
    assert other.identity.key() != one.identity.key()


# --- what is refused ----------------------------------------------------------------------------------------


def refusal(checkpoint: MtpCheckpoint, model: ModelOptions | None = None, **options: object) -> str:
    cached = {name: options.pop(name) for name in ("kv_cache_dtype",) if name in options}
    asked = replace(node_options("unified", checkpoint.served, speculative_config=guessing(), **cached), **options)  # type: ignore[arg-type]
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load(asked if model is None else replace(asked, model=model))
    return str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("deepseek_v3", {"num_nextn_predict_layers": 0}, "is 0: the checkpoint has no layer that guesses"),
        ("mimo", {"num_nextn_predict_layers": 0}, "is 0: the checkpoint has no layer that guesses"),
        ("mimo", {"num_nextn_predict_layers": 2}, "2 layers that guess, of which each does one place"),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, "is 0: the checkpoint has no layer that guesses"),
        ("glm4_moe", {"num_nextn_predict_layers": 2}, "2 layers that guess, of which each does one place"),
        ("mimo", {"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers is '1'; repair the file"),
        ("mimo", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, "a sliding window"),
    ],
)
def test_what_config_says_and_is_not_computed_is_refused(
    family: str, changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    checkpoint = random_mtp(tmp_path, family)
    checkpoint.configure(**changes)
    assert says in refusal(checkpoint)


def test_models_without_such_a_layer_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"mtp is built for deepseek_v3 and mimo, .*; this is llama: choose another"):
        load(node_options("unified", DEMO, speculative_config=guessing()))


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("deepseek_v3", {"compile": True}, "mtp doesn't go with --compile"),
        ("mimo", {"compile": True}, "mtp doesn't go with --compile"),
        ("deepseek_v3", {"kv_cache_dtype": "fp8_e4m3"}, "latents are kept in 16 bits or more"),
        ("glm4_moe", {"compile": True}, "mtp doesn't go with --compile"),
    ],
)
def test_options_that_a_head_does_not_go_with_are_refused(
    family: str, changes: dict[str, object], says: str, tmp_path: Path
) -> None:
    assert says in refusal(random_mtp(tmp_path, family), **changes)


def test_other_models_of_transformers_modules_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = random_mtp(tmp_path, "deepseek_v3")
    model = ModelOptions(str(checkpoint.served), model_impl="transformers")
    assert "this is deepseek_v3 by transformers' modules: choose another method" in refusal(checkpoint, model)


def test_quantised_mimo_is_refused_with_what_to_take(tmp_path: Path) -> None:
    checkpoint = random_mtp(tmp_path / "plain", "mimo")
    quantised, _ = quantised_folders(checkpoint.plain, tmp_path, "fp8_blocks")
    served = replace(checkpoint, served=quantised)
    served.configure(model_type="mimo", architectures=["MiMoForCausalLM"])
    assert "not built for MiMo quantised by fp8: take the checkpoint of 16 bits" in refusal(served)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_without_or_with_a_torn_head_is_refused(family: str, tmp_path: Path) -> None:
    checkpoint = random_mtp(tmp_path, family)
    whole, prefix = checkpoint.tensors(), checkpoint.prefix
    own = [name for name in whole if name.startswith(prefix)]
    norm = f"{prefix}input_layernorm.weight"
    shapes = "another shape" if family == "glm4_moe" else "shape [32], config.json asks for [64]"
    for tensors, says in (
        ({norm: None}, f"no shard holds {norm}"),
        ({norm: torch.ones(32)}, f"{norm} has {shapes}"),
        ({norm: whole[norm], f"{prefix}extra": torch.ones(2)}, f"{prefix}extra, which a model of"),
        (dict.fromkeys([*own, f"{prefix}extra"]), f"no shard holds {prefix}*, the layer that guesses"),
    ):
        checkpoint.rewrite(tensors)
        assert says in refusal(checkpoint)
