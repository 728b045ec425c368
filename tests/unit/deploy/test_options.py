"""Configuration from flags, environment and YAML; the command's errors and exit codes."""

from __future__ import annotations

import dataclasses
import logging
import socket
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tandem.deploy.cli import main, make_parser
from tandem.deploy.command_line.flags import to_arguments
from tandem.deploy.command_line.foreign_names import BENCH_WITHOUT_COUNTERPART, SAME, SHORT, WITHOUT_COUNTERPART
from tandem.deploy.command_line.option import Option
from tandem.deploy.launch import launcher
from tandem.deploy.launch.cluster_plan import plan_cluster, plan_single_node
from tandem.deploy.options import (
    BENCH_OPTIONS,
    DEMO_MODEL,
    EXPLAIN_OPTIONS,
    FIRST,
    KERNELS_OPTIONS,
    KNOWN_NAMES,
    NODE_OPTIONS,
    ROUTER_OPTIONS,
    SERVE_OPTIONS,
    TRACE_OPTIONS,
    build,
    gather,
    own_environment,
)
from tandem.engine.contracts.config import ModelOptions, NodeOptions, RouterOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.process.process_log import start_log

COMMANDS = {
    "serve": SERVE_OPTIONS,
    "router": ROUTER_OPTIONS,
    "decode": NODE_OPTIONS,
    "bench": {**BENCH_OPTIONS, **TRACE_OPTIONS},
    "explain": EXPLAIN_OPTIONS,
    "kernels": KERNELS_OPTIONS,
}


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
        ("prot: 3", "unknown key prot; did you mean port?"),
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


# README says: "A variable that is nearly an option's ends the command"
@pytest.mark.parametrize("name", ["TANDEM_HOME", "TANDEM_VERSION", "TANDEM_IMAGE_TAG"])
def test_an_environment_variable_that_is_no_slip_is_left_alone(name: str, capsys: Any) -> None:
    assert values_of("serve", environ={name: "3"}) == {"model": str(DEMO_MODEL)}
    assert f"{name}: no option is called" in capsys.readouterr().err


# README says: "each is also an environment variable"
def test_tools_take_environment_and_file_too(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("model: /models/m\nconcurrency: 3\ncompare: [http://a, http://b]\nalibi: true\nmax_num_seqs: 2\n")
    environ = {"TANDEM_CONFIG": str(file), "TANDEM_URL": "http://r", "TANDEM_API_KEY": "k", "TANDEM_HEADS": "8"}
    bench = values_of("bench", "--concurrency", "4", environ=environ)
    compared = {"url": "http://r", "api_key": "k", "concurrency": 4, "compare": ("http://a", "http://b")}
    assert bench == compared, "the model to ask for is not the one that is served"
    assert values_of("bench", "--model", "m")["model"] == "m"
    explain = values_of("explain", "a prompt", environ=environ)
    assert explain == {"prompt": "a prompt", "url": "http://r", "api_key": "k"}
    assert values_of("kernels", environ=environ) == {"heads": 8, "alibi": True}
    assert values_of("kernels", environ={"TANDEM_KV_CACHE_DTYPE": "fp8_e4m3"}) == {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.parametrize(
    ("command", "name", "value", "complaint"),
    [
        ("serve", "port", "80000", "argument --port: '80000': it must be a whole number, at least 0 and at most 65535"),
        ("serve", "port", "-1", "--port"),
        ("serve", "max_num_seqs", "-3", "--max-num-seqs"),
        ("serve", "num_threads", "-1", "--num-threads"),
        ("serve", "gpu_memory_utilization", "1.5", "a number, more than 0 and at most 1"),
        ("serve", "workers", "-1", "--workers"),
        ("serve", "prefill", "-1", "--prefill"),
        ("decode", "heartbeat_s", "0", "a number, more than 0"),
        ("decode", "heartbeat_s", "nan", "--heartbeat-s"),
        ("decode", "request_s", "inf", "--request-s"),
        ("bench", "num_requests", "0", "a whole number, at least 1"),
        ("kernels", "rows", "0", "--rows"),
    ],
)
def test_numbers_have_bounds(command: str, name: str, value: str, complaint: str, tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--" + name.replace("_", "-"), value])
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert complaint in errors
    assert len(errors.splitlines()) == 1
    with pytest.raises(ConfigError, match=f"TANDEM_{name.upper()} is "):
        values_of(command, environ={f"TANDEM_{name.upper()}": value})
    file = tmp_path / "options.yaml"
    file.write_text(f"{name}: {value}")
    with pytest.raises(ConfigError, match=f"{name} is "):
        values_of(command, "--config", str(file))


def test_every_number_has_bounds_that_its_default_keeps() -> None:
    for option in [option for options in COMMANDS.values() for option in options.values()]:
        if option.kind in (int, float) and option.name != "seed":
            assert option.meta is not None, option.name
            assert option.parse(option.default, "default") == option.default
            assert refuses(option, "-2"), option.name
            assert option.kind is int or refuses(option, "nan"), option.name
            assert option.kind is int or refuses(option, "inf") or option.name == "rate", "all at once"


def refuses(option: Option, text: str) -> bool:
    try:
        option.parse(text, "it")
    except ConfigError:
        return True
    return False


def test_a_silence_shorter_than_a_heartbeat_is_refused(capsys: Any) -> None:
    assert main(["decode", "--heartbeat-s", "6"]) == 2
    assert "--heartbeat-s 6 must be less than --peer-lost-s 5" in capsys.readouterr().err


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


def help_of(capsys: Any, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    return str(capsys.readouterr().out)


# README says: "`tandem COMMAND --help=all` explains every option"
@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_every_option(command: str, capsys: Any) -> None:
    first, everything = help_of(capsys, command, "--help"), help_of(capsys, command, "--help=all")
    for option in COMMANDS[command].values():
        assert isinstance(option.help, str), option.name
        assert option.help, option.name
        assert (option.name.upper() if option.is_positional else option.flag) in everything
    assert len(first) <= len(everything)


def test_help_begins_with_what_people_use_first(capsys: Any) -> None:
    assert set(KNOWN_NAMES) >= FIRST
    first, about = help_of(capsys, "serve", "--help"), help_of(capsys, "serve", "--help=heartbeat")
    flags = [line.split()[0] for line in first.splitlines() if line.startswith("  --")]
    assert 15 <= len(flags) <= 25
    assert "--port" in flags
    assert "--grant-lease-s" not in first
    assert "--heartbeat-s" in about
    assert "--port" not in about


# --- names that others use ----------------------------------------------------------------------------------------


def test_options_go_by_the_names_that_others_use(tmp_path: Path) -> None:
    vllm = ("--model", "m", "--served-model-name", "x", "-tp", "2", "--max-model-len", "8k", "--enforce-eager")
    ours = ("m", "--served-name", "x", "--tensor-parallel-size", "2", "--max-model-len", "8000", "--no-cuda-graphs")
    assert values_of("serve", *vllm) == values_of("serve", *ours)
    assert values_of("serve", "--kv-cache-dtype", "fp8", "--dtype", "half", "--log-level", "DEBUG") == {
        "model": str(DEMO_MODEL),
        "kv_cache_dtype": "fp8_e4m3",
        "dtype": "float16",
        "log_level": "debug",
    }
    file = tmp_path / "vllm.yaml"
    file.write_text("served-model-name: x\nenforce-eager: true\nmax-model-len: 8K\nseed: 0\n")
    expected = {"model": str(DEMO_MODEL), "served_name": "x", "cuda_graphs": False, "max_model_len": 8192}
    assert values_of("serve", "--config", str(file)) == expected
    environ = {"TANDEM_SERVED_MODEL_NAME": "x", "TANDEM_ENFORCE_EAGER": "1", "TANDEM_MAX_MODEL_LEN": "8192"}
    assert values_of("serve", environ=environ) == expected


def test_every_name_of_others_leads_to_an_option_or_to_none() -> None:
    assert {ours.removeprefix("not ") for ours in SAME.values()} <= KNOWN_NAMES
    assert not set(BENCH_WITHOUT_COUNTERPART) & ({*BENCH_OPTIONS, *TRACE_OPTIONS} | set(SAME))
    assert not set(SAME) & (KNOWN_NAMES | set(WITHOUT_COUNTERPART))
    assert not (set(WITHOUT_COUNTERPART) - {"seed"}) & KNOWN_NAMES
    assert set(SHORT) <= KNOWN_NAMES | set(WITHOUT_COUNTERPART)


def test_what_changes_nothing_is_said_and_what_is_not_there_refused(tmp_path: Path, capsys: Any) -> None:
    plain = {"model": str(DEMO_MODEL)}
    assert values_of("serve", "--trust-remote-code", "-pp", "1", "--seed", "3", "--task", "generate") == plain
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert said[0].startswith("tandem: --trust-remote-code changes nothing here: code that comes with a model")
    assert values_of("serve", "--no-enable-chunked-prefill", "--no-enforce-eager") == {**plain, "cuda_graphs": True}
    for arguments in (["--hf-token", "x"], ["-pp", "2"], ["--task", "embed"]):
        assert main(["serve", *arguments]) == 2
        assert f"{arguments[0]} can't be had here: " in capsys.readouterr().err
    file = tmp_path / "vllm.yaml"
    file.write_text("trust-remote-code: false\nenable-sleep-mode: false\n")
    assert values_of("serve", "--config", str(file)) == plain
    assert capsys.readouterr().err == ""
    file.write_text("enable-sleep-mode: true\n")
    with pytest.raises(ConfigError, match="enable_sleep_mode can't be had here"):
        values_of("serve", "--config", str(file))


@pytest.mark.parametrize(
    ("text", "number"),
    [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("4GiB", 4 << 30), ("16G", 16 << 30), ("12", 12), ("-1", -1)],
)
def test_whole_numbers_have_units(text: str, number: int) -> None:
    assert SERVE_OPTIONS["host_tier_bytes"].parse(text, "it") == number


@pytest.mark.parametrize("text", ["8x", "1.5", "k", "1e3", "0.0001k", ""])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    assert refuses(SERVE_OPTIONS["host_tier_bytes"], text)


def test_help_says_what_a_default_of_zero_means() -> None:
    options = {**SERVE_OPTIONS, **NODE_OPTIONS, **ROUTER_OPTIONS}
    plain = {
        name
        for name, option in options.items()
        if option.help_with_default.endswith(("(default: 0)", "(default: 0.0)"))
    }
    meant = {"prefill", "decode", "elastic", "device_index", "data_parallel_rank", "ray_routers"}
    assert plain == meant, "numbers that mean what they say"
    assert "; 0, the default: sized by" in NODE_OPTIONS["kv_cache_memory_bytes"].help_with_default
    assert "(0, the default: off)" in ROUTER_OPTIONS["rebalance_kv"].help_with_default


def test_options_cover_every_field() -> None:
    for component, options in ((NodeOptions, NODE_OPTIONS), (RouterOptions, ROUTER_OPTIONS)):
        nested = {"model", "cache", "scheduler", "timeouts", "web", "lora", "media", "role"}
        assert {field.name for field in dataclasses.fields(component)} - nested <= set(options)


# --- the command ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["serve", "decode", "router"])
def test_a_folder_that_is_no_model_is_refused(command: str, tmp_path: Path, capsys: Any) -> None:
    assert main([command, str(tmp_path)]) == 2
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


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "--no-such-flag"], "unknown option --no-such-flag"),
        (["serve", "--served-nam", "foo"], "unknown option --served-nam; did you mean --served-name?"),
        (["serve", "--max-num-seq=3"], "unknown option --max-num-seq; did you mean --max-num-seqs?"),
        (["serve", "--api-keys", "keys"], "unknown option --api-keys; did you mean --api-key"),
        (["bench", "--num-request", "3"], "did you mean --num-requests?"),
        (["serve", "m", "second"], "unexpected argument 'second'"),
        (["serv"], "unknown command 'serv'; did you mean serve?"),
        (["serve", "--help=nonsense"], "no option has to do with 'nonsense'"),
    ],
)
def test_unknown_flags_end_with_exit_code_two(arguments: list[str], complaint: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    errors = capsys.readouterr().err
    assert complaint in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--version"], ["version"]])
def test_it_says_its_version(arguments: list[str], capsys: Any) -> None:
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert (code, capsys.readouterr().out) == (0, f"tandem {version('tandem-serve')}\n")


def test_secrets_are_in_no_command_line() -> None:
    url = "redis://:hunter2@r/0"
    values = values_of("serve", "m", "--prefill", "1", "--decode", "1", environ={"TANDEM_REDIS_URL": url})
    values["api_key"] = "sk-hunter2"
    *nodes, router = plan_cluster(values, url)
    assert not any("hunter2" in " ".join((*plan.command, *plan.arguments)) for plan in (*nodes, router))
    assert all(plan.environment == {"TANDEM_REDIS_URL": url} for plan in nodes)
    assert router.environment == {"TANDEM_REDIS_URL": url, "TANDEM_API_KEY": "sk-hunter2"}
    assert values_of("router", environ=dict(router.environment))["api_key"] == "sk-hunter2"
    assert "hunter2" not in repr(RouterOptions(ModelOptions("m"), api_key="sk-hunter2"))


def test_the_log_has_a_level(capsys: Any) -> None:
    quiet = node_of("--log-level", "warning")
    assert quiet.log_level == "warning"
    try:
        start_log(quiet.log_level)
        assert logging.getLogger("tandem.engine").getEffectiveLevel() == logging.WARNING
    finally:
        start_log()
    assert logging.getLogger("tandem.engine").getEffectiveLevel() == logging.INFO


def test_a_router_needs_somewhere_to_learn_of_nodes(capsys: Any) -> None:
    assert main(["router"]) == 2
    assert "--redis-url, or by --node" in capsys.readouterr().err


# --- what `serve` finds wrong before it starts anything ---------------------------------------------------------


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(launcher, "ChildProcess", start)
    monkeypatch.setattr(launcher, "RedisServer", start)


@pytest.mark.usefixtures("no_children")
def test_a_taken_port_is_found_before_anything_starts(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


@pytest.mark.usefixtures("no_children")
def test_keys_and_tokenizer_are_read_before_anything_starts(tmp_path: Path, capsys: Any) -> None:
    assert main(["serve", "--port", "0", "--api-keys-file", "/nope"]) == 2
    assert "can't read the API keys file /nope" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--api-keys-file", "/nope", "--api-key", "k"]) == 2
    assert "both given" in capsys.readouterr().err
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(DEMO_MODEL / name)
    assert main(["serve", str(tmp_path), "--port", "0"]) == 2
    assert "has no tokenizer.json" in capsys.readouterr().err


@pytest.mark.usefixtures("no_children")
def test_a_redis_that_does_not_answer_is_found_before_anything_starts(capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        url = f"redis://:hunter2@127.0.0.1:{probe.getsockname()[1]}"
    assert main(["serve", "--port", "0", "--prefill", "1", "--decode", "1", "--redis-url", url]) == 2
    errors = capsys.readouterr().err
    assert "no Redis answers at --redis-url" in errors
    assert "hunter2" not in errors
