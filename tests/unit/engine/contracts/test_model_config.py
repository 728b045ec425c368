"""Folders that are no model are refused quickly, by an error that names the file and the remedy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from waiting import PATIENCE_S

from tandem.engine.contracts.errors import CheckpointError
from tandem.engine.contracts.model_config import ModelConfig, load_model_config
from tandem.engine.contracts.model_folder import resolve_model
from tiny_models import KINDS, tiny_model


def copy_of(kind: str, tmp_path: Path) -> Path:
    folder = tmp_path / kind
    shutil.copytree(tiny_model(kind), folder)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("with_weights", [True, False])
def test_an_adapter_is_refused_whether_its_base_lies_beside_it_or_not(tmp_path: Path, with_weights: bool) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "m") if with_weights else tmp_path
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "base"}')
    with pytest.raises(CheckpointError, match=r"adapter_config\.json: adapters .* merge it into its base model"):
        load_model_config(folder)


def test_a_path_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve_model("/nowhere/model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "of gpt_oss alone, and of that alone, experts are in MXFP4",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised weights of quant_method 'hqq'"),
        ({"num_key_value_heads": 3}, "can't share"),
        ({"dtype": "int8"}, "dtype int8"),
        ({"rope_parameters": {"rope_type": "linear"}}, r"config\.json: 'factor' is missing in rope_parameters"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "'low_freq_factor' is missing"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -1}},
            r"Expected `float` > 0.0 - at `\$.factor`",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 15}, "odd"),
        ({"hidden_size": 0}, r"Expected `int` >= 1 - at `\$.hidden_size`"),
        ({"hidden_size": "wide"}, r"config\.json: Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_computed_exactly_is_refused(tmp_path: Path, changes: dict, message: str) -> None:
    folder = copy_of("llama", tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model_config(folder)


def test_broken_json_and_missing_keys_name_the_file(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    del raw["hidden_size"]
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"config\.json.*hidden_size"):
        load_model_config(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(folder)


def test_old_and_new_rope_keys_mean_the_same(tmp_path: Path) -> None:
    folder = copy_of("llama3_rope", tmp_path)
    new = load_model_config(folder).rope
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    edit_config(folder, rope_parameters=None, rope_theta=rope.pop("rope_theta"), rope_scaling=rope)
    assert load_model_config(folder).rope == new
    assert new.rope_type == "llama3"


def edited(kind: str, tmp_path: Path, **changes: object) -> ModelConfig:
    folder = copy_of(kind, tmp_path)
    edit_config(folder, **changes)
    return load_model_config(folder)


def test_mimo_is_read_as_qwen2_whatever_heads_it_has(tmp_path: Path) -> None:
    """Its own configuration class is Qwen2's, with a number of layers that guess."""
    qwen2 = load_model_config(tiny_model("qwen2"))
    own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True}
    mimo = edited("qwen2", tmp_path, **own, num_nextn_predict_layers=1)
    assert msgspec.structs.replace(mimo, architecture="qwen2") == qwen2
    assert mimo.qkv_bias
    edit_config(tmp_path / "qwen2", architectures=["MiMoV2FlashForCausalLM"])
    with pytest.raises(CheckpointError, match="MiMoV2FlashForCausalLM is not supported with model_type mimo"):
        load_model_config(tmp_path / "qwen2")


def test_generation_config_names_the_end_of_sequence_if_it_names_any(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    edit_config(folder, eos_token_id=7)
    generation = folder / "generation_config.json"
    for ids, expected in ([8, 9], (8, 9)), (8, (8,)), (None, (7,)):
        generation.write_text(json.dumps({"eos_token_id": ids}))
        assert load_model_config(folder).eos_token_ids == expected
    generation.write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model_config(folder)
    generation.unlink()
    assert load_model_config(folder).eos_token_ids == (7,)


def test_mistral_has_a_window_unless_the_file_says_null(tmp_path: Path) -> None:
    folder = copy_of("mistral", tmp_path)
    assert load_model_config(folder).window_of(2) == 32
    edit_config(folder, sliding_window=None)
    assert load_model_config(folder).window_of(2) is None
    raw = json.loads((folder / "config.json").read_text())
    del raw["sliding_window"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert load_model_config(folder).window_of(2) == 4096


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"use_sliding_window": False}, [None, None, None]),
        ({"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}, [None, 20, 20]),
        ({"use_sliding_window": True, "max_window_layers": 28, "layer_types": None}, [None, None, None]),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            [20, None, None],
        ),
    ],
)
def test_qwen_windows_follow_its_own_switches(tmp_path: Path, changes: dict, windows: list[int | None]) -> None:
    config = edited("qwen2", tmp_path, sliding_window=20, **changes)
    assert [config.window_of(layer) for layer in range(3)] == windows


def test_options_that_an_architecture_does_not_read_are_ignored_as_transformers_does(tmp_path: Path) -> None:
    config = edited("mistral", tmp_path, attention_bias=True, mlp_bias=True)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (False, False, False)


def test_scaled_rope_lengthens_the_model() -> None:
    lengths = {kind: load_model_config(tiny_model(kind)).max_model_len for kind in KINDS}
    assert lengths["llama_linear"] == 2 * 2048
    assert lengths["llama_yarn"] == 4 * 512
    assert lengths["llama3_rope"] == lengths["llama"] == 2048


def test_reading_a_config_takes_no_torch() -> None:
    names = "tandem.engine.contracts.model_config, tandem.engine.models.identity"
    code = f"import sys, {names}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize("hub", ["silent", "absent"])
def test_a_hub_that_does_not_answer_is_given_up_soon(hub: str, tmp_path: Path) -> None:
    """In a process of its own, because the hub client reads its address when it is imported."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if hub == "silent":
            server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
        code = "from tandem.engine.contracts.model_folder import resolve_model; resolve_model('someone/some-model')"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**kept, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "NO_PROXY": "*"},
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE_S,
        )
        server.setblocking(False)
        num_probes = 0
        with contextlib.suppress(OSError):
            while True:
                server.accept()[0].close()
                num_probes += 1
    assert "CheckpointError: there is no folder 'someone/some-model' here" in done.stderr
    assert "give its folder" in done.stderr
    assert num_probes <= 2, "it is asked again and again, and each time waited for"
