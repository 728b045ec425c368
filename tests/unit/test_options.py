"""Configuration from flags, environment and YAML; the command's errors and exit codes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.cli import main, make_parser
from tandem.deploy.cluster_plan import plan_single_node
from tandem.deploy.option_help import OPTION_HELP
from tandem.deploy.options import (
    DEMO_MODEL,
    NODE_OPTIONS,
    ROUTER_OPTIONS,
    SERVE_OPTIONS,
    build,
    gather,
    own_environment,
    to_arguments,
)
from tandem.engine.config import ModelOptions, NodeOptions, RouterOptions
from tandem.engine.errors import ConfigError

COMMANDS = {"serve": SERVE_OPTIONS, "router": ROUTER_OPTIONS, "decode": NODE_OPTIONS}


def values_of(*arguments: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    parsed = vars(make_parser().parse_args(arguments))
    return gather(COMMANDS[arguments[0]], parsed, environ or {})


def node_of(*arguments: str, environ: dict[str, str] | None = None) -> NodeOptions:
    return build(NodeOptions, values_of("decode", *arguments, environ=environ), role="decode")


def test_defaults_are_those_of_the_dataclasses_and_the_demo_model() -> None:
    assert node_of() == NodeOptions(role="decode", model=ModelOptions(model=str(DEMO_MODEL)))
    assert build(RouterOptions, values_of("router", "m")) == RouterOptions(model=ModelOptions(model="m"))
    assert (DEMO_MODEL / "config.json").is_file()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("max-num-seqs: 1\nblock_size: 128\nheartbeat_s: 2\ndevice: cpu\n")
    environ = {"TANDEM_CONFIG": str(file), "TANDEM_MAX_NUM_SEQS": "2", "TANDEM_BLOCK_SIZE": "192"}
    options = node_of("m", "--max-num-seqs", "3", environ=environ)
    assert options.scheduler.max_num_seqs == 3
    assert options.cache.block_size == 192
    assert options.timeouts.heartbeat_s == 2.0
    assert options.device == "cpu"


def test_booleans_and_lists_from_every_source(tmp_path: Path) -> None:
    assert node_of("--no-digests").digests is False
    assert node_of(environ={"TANDEM_ENABLE_PREFIX_CACHING": "off"}).cache.enable_prefix_caching is False
    file = tmp_path / "options.yaml"
    file.write_text("nodes: [tcp://a:1, tcp://b:2]\ndigests: false\n")
    expected = ("tcp://a:1", "tcp://b:2")
    for values in (
        values_of("router", "--config", str(file)),
        values_of("router", environ={"TANDEM_NODES": "tcp://a:1, tcp://b:2"}),
        values_of("router", "--node", "tcp://a:1", "--node", "tcp://b:2"),
    ):
        assert build(RouterOptions, values).nodes == expected


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("blok_size: 3", "unknown key blok_size; did you mean block_size"),
        ("block_size: many", "block_size is 'many': it must be a whole number"),
        ("block_size: 1.5", "block_size is 1.5"),
        ("block_size: true", "block_size is True"),
        ("digests: 7", "digests is 7: it must be true or false"),
        ("device: tpu", "device is 'tpu': it must be auto or cpu or cuda"),
        ("nodes: {a: 1}", "nodes is {'a': 1}: it must be a list"),
        ("- a\n- b", "must hold options by name"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        values_of("router" if "nodes" in content else "decode", "--config", str(file))
    assert complaint in caught.value.message
    assert str(file) in caught.value.message


def test_a_missing_file_is_refused() -> None:
    with pytest.raises(ConfigError, match="can't read /nowhere"):
        values_of("serve", "--config", "/nowhere/options.yaml")


def test_unknown_and_wrong_environment_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"TANDEM_MAX_NUM_SEQ:.*did you mean max_num_seqs"):
        values_of("serve", environ={"TANDEM_MAX_NUM_SEQ": "3"})
    with pytest.raises(ConfigError, match="TANDEM_BLOCK_SIZE is 'x'"):
        values_of("serve", environ={"TANDEM_BLOCK_SIZE": "x"})


def test_service_links_of_kubernetes_are_no_options() -> None:
    links = {
        "TANDEM_ROUTER_SERVICE_HOST": "10.0.0.1",
        "TANDEM_SERVICE_PORT_HTTP": "80",
        "TANDEM_PORT": "tcp://10.0.0.1:80",
        "TANDEM_PORT_80_TCP_ADDR": "10.0.0.1",
    }
    assert values_of("router", environ=links) == {"model": str(DEMO_MODEL)}
    assert values_of("router", environ={"TANDEM_PORT": "9000"})["port"] == 9000


def test_children_get_the_options_as_flags_and_not_twice() -> None:
    given = ("m", "--no-digests", "--growth-headroom", "0.25", "--served-name", "a b", "--device", "cpu")
    values = values_of("decode", *given)
    assert values_of("decode", *to_arguments(NODE_OPTIONS, values)) == values
    assert own_environment({"TANDEM_PORT": "1", "TANDEM_DEVICE": "cpu", "HOME": "/"}) == {"HOME": "/"}


def test_serve_gives_each_child_what_is_its_own() -> None:
    values = values_of("serve", "m", "--port", "9", "--max-queue", "7", "--block-size", "128", "--workers", "2")
    node, router = plan_single_node(values)
    assert set(node.arguments) == {"m", "--max-queue=7", "--block-size=128"}
    assert set(router.arguments) == {"m", "--port=9", "--max-queue=7", "--workers=2"}


def test_every_field_has_help_and_every_help_a_field() -> None:
    assert set(OPTION_HELP) == set(NODE_OPTIONS) | set(ROUTER_OPTIONS) | set(SERVE_OPTIONS)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0


def test_options_cover_every_field() -> None:
    for component, options in ((NodeOptions, NODE_OPTIONS), (RouterOptions, ROUTER_OPTIONS)):
        nested = {"model", "cache", "scheduler", "timeouts", "role"}
        assert {field.name for field in dataclasses.fields(component)} - nested <= set(options)


# --- the command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "decode", "router"])
def test_a_folder_that_is_no_model_is_refused_at_once(command: str, tmp_path: Path, capsys: Any) -> None:
    started = time.monotonic()
    assert main([command, str(tmp_path)]) == 2
    assert time.monotonic() - started < 5.0
    assert "config.json" in capsys.readouterr().err


def test_a_missing_shard_is_refused_by_name_unless_weights_are_made_up(tmp_path: Path, capsys: Any) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((DEMO_MODEL / name).read_bytes())
    assert main(["serve", str(tmp_path)]) == 2
    errors = capsys.readouterr().err
    assert str(tmp_path / "model.safetensors") in errors
    assert "Traceback" not in errors
    assert main(["serve", str(tmp_path), "--load-format", "dummy", "--prefill", "1"]) == 2
    assert "--prefill and --decode go together" in capsys.readouterr().err


def test_the_command_line_starts_without_torch() -> None:
    code = "import sys; from tandem.deploy.cli import make_parser; make_parser(); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "fastapi", "zmq", "redis", "yaml"} & set(modules)


def test_unknown_flags_end_with_exit_code_two(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--no-such-flag"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err
