"""A head of the model's own guesses: no output changes, and one that knows the model is right wherever KV came from."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_heads import DEMO, TINY_HEAD, knowing_head, random_head, walking_model
from quantised_checkpoints import mxfp4_folders
from served_head import (
    GREEDY,
    ONE_AND_SPLIT,
    check_adapters,
    check_knowing,
    check_knowing_on_ranks,
    check_moved,
    nodes_of,
)
from split_pair import changed
from tiny_hf_models import tiny_hf_model

from in_process_cluster import Node, client_of, node_options
from tandem.engine.contracts.config import ModelOptions
from tandem.engine.contracts.errors import CheckpointError, ConfigError
from tandem.engine.models.hf.model import HFModel
from tandem.node.setup import load
from tiny_models import check_greedy, random_prompt

FP8 = {"kv_cache_dtype": "fp8_e4m3"}


def headed(folder: Path, count: int = 4) -> str:
    return json.dumps({"method": "eagle3", "model": str(folder), "num_speculative_tokens": count})


def check_split(model: Path, twin: Path, config: str) -> Node:
    """A decode and a prefill node make the tokens of `twin`, which transformers reads. Returns the first."""
    nodes, where = nodes_of(["decode", "prefill"], lambda role: node_options(role, model, speculative_config=config))
    with client_of(nodes) as client:
        prompts = [random_prompt(length, length) for length in (1, 17, 90)]
        asked = [client.submit(f"{len(each)}", each, changed(GREEDY, max_tokens=24), **where) for each in prompts]
        client.wait()
        for prompt, result in zip(prompts, asked, strict=True):
            check_greedy(twin, prompt, result.output(), 24)
    return nodes[0]


@pytest.mark.parametrize("roles", ONE_AND_SPLIT, ids=["one", "split"])
def test_a_head_that_knows_the_model_is_right(roles: list[str], tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model"), headed(knowing_head(tmp_path / "head"))
    nodes, where = nodes_of(roles, lambda role: node_options(role, model, speculative_config=config, chunk=32))
    check_knowing(nodes, where, most_steps=30)


@pytest.mark.parametrize("roles", [["unified"], ["decode", "prefill"]], ids=["one", "split"])
def test_a_head_beside_transformers_modules_is_as_right(roles: list[str], tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model"), headed(knowing_head(tmp_path / "head"))
    theirs = ModelOptions(str(model), model_impl="transformers")
    nodes, where = nodes_of(
        roles, lambda role: replace(node_options(role, model, speculative_config=config, chunk=32), model=theirs)
    )
    assert all(isinstance(node.process.loaded.model, HFModel) for node in nodes)
    check_knowing(nodes, where, most_steps=30)


@pytest.mark.parametrize(
    "kept",
    [{"unified": FP8}, {"decode": FP8, "prefill": FP8}, {"decode": FP8, "prefill": {}}],
    ids=["one", "split", "converted"],
)
def test_a_head_that_knows_the_model_is_right_over_kv_of_fp8(kept: dict[str, dict[str, str]], tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model"), headed(knowing_head(tmp_path / "head"))
    nodes, where = nodes_of(
        list(kept), lambda role: node_options(role, model, speculative_config=config, chunk=32, **kept[role])
    )
    check_knowing(nodes, where, most_steps=30)


def test_the_layer_of_a_head_has_a_scale_of_its_own(tmp_path: Path) -> None:
    scales = tmp_path / "scales.json"
    scales.write_text(json.dumps({"k": [0.5] * 5, "v": [2.0] * 5}))
    options = node_options("unified", DEMO, speculative_config=headed(random_head(tmp_path / "head")), **FP8)
    loaded = load(replace(options, cache=replace(options.cache, kv_scales=str(scales))))
    assert (loaded.layout.group.k_scales, loaded.layout.group.v_scales) == ((*[0.5] * 5, 1.0), (*[2.0] * 5, 1.0))


@pytest.mark.parametrize("family", ["gemma3_text", "olmo2"])
def test_a_head_changes_no_token_of_transformers_modules(family: str, tmp_path: Path) -> None:
    """Also where layers slide, and are kept apart from the head's."""
    model = tiny_hf_model(family)
    decode = check_split(model, model, headed(random_head(tmp_path / "head", **TINY_HEAD)))
    assert decode.process.logic.scheduler.spec_counters["spec_draft_tokens"] > 0


@pytest.mark.parametrize(
    "ranks",
    [
        {"unified": 2},
        pytest.param({"prefill": 1, "decode": 2}, marks=pytest.mark.slow),
        pytest.param({"prefill": 2, "decode": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_share_a_head_out(ranks: dict[str, int], tmp_path: Path) -> None:
    """Its keys are handed over between unlike numbers of ranks, and ranks guess together."""
    model, config = walking_model(tmp_path / "model"), headed(knowing_head(tmp_path / "head"))
    check_knowing_on_ranks(ranks, model, config)


def test_ranks_share_a_head_out_beside_transformers_modules(tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model"), headed(knowing_head(tmp_path / "head"))
    check_knowing_on_ranks({"unified": 2}, model, config, model_impl="transformers")


def test_drawn_tokens_are_guessed_by_the_numbers_of_their_places(tmp_path: Path) -> None:
    """Where model and head have the same distribution, at a temperature that draws now this token, now that."""
    model, head = walking_model(tmp_path / "model"), knowing_head(tmp_path / "head")
    drawn, outputs = changed(GREEDY, temperature=1.5, seed=4, max_tokens=40), []
    for config in ("", headed(head)):
        node = Node(node_options("unified", model, speculative_config=config))
        with client_of([node]) as client:
            result = client.submit("drawn", [1, 2, 3, 4, 5], drawn, decode=node.info)
            client.wait(result)
            outputs.append(result.output())
    assert outputs[0] == outputs[1]


def test_a_stream_that_moves_takes_the_heads_keys_along(tmp_path: Path) -> None:
    model, config = walking_model(tmp_path / "model"), headed(knowing_head(tmp_path / "head"))
    check_moved(lambda role: node_options(role, model, speculative_config=config))


def test_a_head_beside_sinks_windows_and_experts_in_mxfp4(tmp_path: Path) -> None:
    """Of GPT-OSS, split; one that guesses wrong changes no token."""
    model, twin = mxfp4_folders(tiny_hf_model("gpt_oss"), tmp_path)
    check_split(model, twin, headed(random_head(tmp_path / "head", **TINY_HEAD)))


@pytest.mark.slow  # as test_mtp.py asks of another head
def test_adapters_and_log_probabilities_of_prompts_stay_what_they_are(tmp_path: Path) -> None:
    config, prompt = headed(random_head(tmp_path / "head")), [17 * place % 2000 + 10 for place in range(50)]
    check_adapters(DEMO, DEMO, config, prompt, tmp_path / "adapter")


# --- what is refused ----------------------------------------------------------------------------------------


def test_kv_of_another_head_is_that_of_another_model(tmp_path: Path) -> None:
    plain, one, other = (
        load(node_options("prefill", DEMO, speculative_config=config))
        for config in ("", headed(random_head(tmp_path / "a")), headed(random_head(tmp_path / "b", seed=1)))
    )
    assert len({loaded.identity.key() for loaded in (plain, one, other)}) == 3
    assert one.layout.group.num_layers == plain.layout.group.num_layers + 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 2}, "has one layer, not 2"),
        ({"vocab_size": 1000}, "vocab_size of the head is 1000, of the served model 2048"),
        ({"num_key_value_heads": 4}, "num_key_value_heads of the head is 4"),
        ({"eagle_config": {}}, "inputs of layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "only EAGLE-3 heads"),
        ({"fc_norm": True}, "fc_norm is True: such heads are not built"),
        ({"draft_vocab_size": 4096}, "draft_vocab_size is 4096"),
        ({"model_type": "qwen3_moe"}, "not supported"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_by_name(changes: dict[str, object], says: str, tmp_path: Path) -> None:
    random_head(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises((ConfigError, CheckpointError), match=says):
        load(node_options("unified", DEMO, speculative_config=headed(tmp_path)))


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    options = node_options("unified", DEMO, speculative_config=headed(random_head(tmp_path)))
    with pytest.raises(ConfigError, match="--compile"):
        load(replace(options, compile=True))


def test_a_model_that_sees_pictures_is_refused_by_name(tmp_path: Path) -> None:
    config = headed(random_head(tmp_path, **TINY_HEAD))
    with pytest.raises(ConfigError, match="takes more than text"):
        load(node_options("unified", tiny_hf_model("qwen2_5_vl"), speculative_config=config))


def test_a_head_as_pickles_is_refused_with_what_to_do(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    head = random_head(tmp_path / "a head")
    options = node_options("unified", DEMO, speculative_config=headed(head))
    shared = load_file(head / "model.safetensors")
    unread = {"t2d": torch.ones(8, dtype=torch.bool), "embed_tokens.weight": shared["fc.weight"]}
    torch.save({**shared, **unread}, head / "pytorch_model.bin")
    (head / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickle format, which is never read") as refused:
        load(options)
    command = shlex.split(str(refused.value).splitlines()[-1])
    subprocess.run([sys.executable, *command[1:]], check=True, timeout=120)
    assert load(options).draft is not None
    (head / "pytorch_model.bin").unlink()
    (head / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"hf download NAME --local-dir DIR`, give DIR, and convert them"):
        load(options)


def test_a_torn_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    random_head(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for change, says in (
        ({"d2t": None}, "holds d2t"),
        ({"fc.weight": None}, "no shard holds fc.weight"),
        ({"d2t": whole["d2t"] + 4000}, "tokens beyond"),
        ({"lm_head.weight": whole["lm_head.weight"][1:].clone()}, "lm_head.weight is F32"),
        ({"midlayer.extra": whole["fc.weight"].clone()}, "which an EAGLE-3 head"),
    ):
        tensors = {name: tensor for name, tensor in (whole | change).items() if tensor is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=says):
            load(node_options("unified", DEMO, speculative_config=headed(tmp_path)))
