"""Configuration from command line, environment, YAML and defaults, in that order of precedence.

Every field of engine/contracts/config.py is one option: `--max-num-seqs`, `TANDEM_MAX_NUM_SEQS`, `max_num_seqs:` in the
YAML file. Names are flat; no two components give one name two meanings for the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from tandem.deploy.command_line.flags import ENV_PREFIX
from tandem.deploy.command_line.foreign_names import SAME, WITHOUT_COUNTERPART, translate
from tandem.deploy.command_line.option import COMPONENTS, Option, did_you_mean, options_of
from tandem.deploy.command_line.tool_options import (
    BenchOptions,
    CalibrateOptions,
    ChatOptions,
    CompleteOptions,
    DrainOptions,
    ExplainOptions,
    KernelsOptions,
    PlanOptions,
    ProfileOptions,
    RoleOptions,
    ScaleOptions,
    StatusOptions,
    StoryOptions,
    TraceOptions,
)
from tandem.engine.contracts.config import (
    CacheOptions,
    Count,
    LoraOptions,
    MediaOptions,
    ModelOptions,
    NodeOptions,
    RouterOptions,
    SchedulerOptions,
    Timeouts,
    WebOptions,
)
from tandem.engine.contracts.errors import ConfigError

DEMO_MODEL = Path(__file__).resolve().parent / "demo_model"
# Kubernetes puts these into every container for a Service called tandem or tandem-something.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$")

# What the help of a command shows at first.
FIRST = frozenset({
    "model", "served_name", "dtype", "max_model_len", "prefill", "decode", "elastic", "host", "port", "api_key",
    "chat_template", "tool_call_parser", "reasoning_parser", "device", "tensor_parallel_size",
    "gpu_memory_utilization", "config", "kv_cache_dtype", "max_num_seqs", "max_num_batched_tokens", "redis_url",
    "cluster_secret_file", "node_id", "nodes", "log_level", "log_format",
})  # fmt: skip
LIKELY_A_SLIP = 0.75  # a guess: MAX_NUM_SEQ is one, VERSION is none for `revision`

T = TypeVar("T")
Values = dict[str, Any]


@dataclass(frozen=True)
class ClusterOptions:
    """What `tandem serve` takes besides the options of its children."""

    prefill: Annotated[Count, "number of prefill nodes; with --decode: a local cluster instead of a single node"] = 0
    decode: Annotated[Count, "number of decode nodes; with --prefill: a local cluster instead of a single node"] = 0
    elastic: Annotated[
        Count,
        "number of nodes that do all work and compute for each other where that helps, by --ttft-target-ms and "
        "--tpot-target-ms: a local cluster (docs/elastic.md)",
    ] = 0
    fixed_roles: Annotated[
        bool,
        "nodes of --prefill and --decode stay what they are; with --no-fixed-roles they do all work, begin with that "
        "leaning and change it by demand: a local cluster with --tpot-target-ms (docs/elastic.md)",
    ] = True
    prefill_tensor_parallel_size: Annotated[Count, "GPUs of each prefill node; 0: as --tensor-parallel-size"] = 0
    decode_tensor_parallel_size: Annotated[Count, "GPUs of each decode node; 0: as --tensor-parallel-size"] = 0
    ray: Annotated[
        str, "address of a Ray cluster whose hosts run the nodes (docs/several_hosts.md), auto: the one this host is of"
    ] = ""
    ray_routers: Annotated[Count, "with --ray: routers on its hosts beside the one here, on the ports after --port"] = 0
    prefill_max: Annotated[Count, "with --ray: prefill nodes at most, as many as are lacking; 0: always --prefill"] = 0
    decode_max: Annotated[Count, "with --ray: decode nodes at most, as many as are lacking; 0: always --decode"] = 0
    elastic_max: Annotated[Count, "with --ray: nodes at most, as many as are lacking; 0: always --elastic"] = 0
    pool_min: Annotated[
        Count, "with --prefill-max and the like: nodes that stay of each pool when there is little to do; 0: none"
    ] = 1
    pool_idle_s: Annotated[
        float, Meta(ge=1, le=1e6), "fewer nodes must have been enough for so long before one of them is drained"
    ] = 300.0
    log_stats: Annotated[bool, "every 10 s say how many requests are under way, and at what rates"] = True


@dataclass(frozen=True)
class Setting:
    """An option's value and where it is set."""

    value: Any
    origin: str


NODE_OPTIONS = options_of(
    ModelOptions, CacheOptions, SchedulerOptions, LoraOptions, Timeouts, NodeOptions, positional="model"
)
ROUTER_OPTIONS = options_of(
    ModelOptions, LoraOptions, Timeouts, WebOptions, MediaOptions, RouterOptions, positional="model"
)
_PER_PROCESS = ("node_id", "device_index", "ready_fd", "nodes", "data_parallel_rank", "leaning")
SERVE_OPTIONS = {
    **options_of(ModelOptions, ClusterOptions, positional="model"),
    **{name: option for name, option in {**NODE_OPTIONS, **ROUTER_OPTIONS}.items() if name not in _PER_PROCESS},
}
BENCH_OPTIONS, TRACE_OPTIONS = options_of(BenchOptions), options_of(TraceOptions)
EXPLAIN_OPTIONS = options_of(ExplainOptions, positional="prompt")
KERNELS_OPTIONS, STATUS_OPTIONS = options_of(KernelsOptions), options_of(StatusOptions, positional="url")
CALIBRATE_OPTIONS = options_of(CalibrateOptions, positional="model")
PLAN_OPTIONS = options_of(PlanOptions)
PROFILE_OPTIONS = options_of(ProfileOptions, positional="url")
CHAT_OPTIONS = options_of(ChatOptions, positional="message")
COMPLETE_OPTIONS = options_of(CompleteOptions, positional="prompt")
DRAIN_OPTIONS, ROLE_OPTIONS = (
    options_of(DrainOptions, positional="node"),
    options_of(RoleOptions, positional="node new_role"),
)
STORY_OPTIONS = options_of(StoryOptions, positional="request_id")
SCALE_OPTIONS = options_of(ScaleOptions)
_SERVERS = (SERVE_OPTIONS, NODE_OPTIONS, ROUTER_OPTIONS)
_TOOLS = (
    BENCH_OPTIONS, TRACE_OPTIONS, EXPLAIN_OPTIONS, CALIBRATE_OPTIONS, PROFILE_OPTIONS, KERNELS_OPTIONS, CHAT_OPTIONS,
    COMPLETE_OPTIONS, STATUS_OPTIONS, PLAN_OPTIONS, DRAIN_OPTIONS, ROLE_OPTIONS, STORY_OPTIONS, SCALE_OPTIONS,
)  # fmt: skip
KNOWN_NAMES = frozenset({"config"}.union(*_SERVERS, *_TOOLS))


# --- the three sources ------------------------------------------------------------------------------------------


def settings(options: Mapping[str, Option], given: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Setting]:
    """Every option that is set anywhere. Raises ConfigError that names a wrong or unknown key."""
    from_env = _read_environment(environ)
    in_env = from_env.pop("config", None)
    file = given.get("config") or (in_env.value if in_env else "")
    found: dict[str, Setting] = {}
    for source in (_read_yaml(Path(file)) if file else {}, from_env):
        for name, setting in source.items():
            # For what talks to a server, which model to ask for is a flag alone: `model` is what is served.
            if name in options and (name != "model" or options[name].is_positional):
                found[name] = Setting(options[name].parse(setting.value, setting.origin), setting.origin)
    for name, value in given.items():
        if name in options:
            found[name] = Setting(tuple(value) if options[name].kind is tuple else value, "command line")
    if "model" in options and options["model"].is_positional:
        found.setdefault("model", Setting(str(DEMO_MODEL), "default"))
    return found


def gather(options: Mapping[str, Option], given: Mapping[str, Any], environ: Mapping[str, str]) -> Values:
    """The value of every option that is set anywhere. Raises ConfigError that names a wrong or unknown key."""
    return {name: setting.value for name, setting in settings(options, given, environ).items()}


def _read_environment(environ: Mapping[str, str]) -> dict[str, Setting]:
    found = {}
    for key, value in environ.items():
        name = key.removeprefix(ENV_PREFIX).lower()
        if not key.startswith(ENV_PREFIX) or _is_service_link(key, value):
            continue
        if name in KNOWN_NAMES or name in SAME:
            ours, meant = (name, value) if name in KNOWN_NAMES else translate(name, value)
            found[ours] = Setting(meant, key)
            continue
        text = f"unknown environment variable {key}: no option is called {name}"
        if close := did_you_mean(name, KNOWN_NAMES, LIKELY_A_SLIP):
            raise ConfigError(text + close)
        print(f"tandem: {text}; it is left alone", file=sys.stderr)  # an image's TANDEM_HOME, say
    return found


def _is_service_link(key: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(key)) and (key != "TANDEM_PORT" or value.startswith(("tcp://", "udp://")))


def _read_yaml(path: Path) -> dict[str, Setting]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold options by name, for example `max_num_seqs: 32`")
    found = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in KNOWN_NAMES and name in WITHOUT_COUNTERPART:
            WITHOUT_COUNTERPART[name].heed(f"{path}: {name}", value)
            continue
        ours, meant = (name, value) if name in KNOWN_NAMES else translate(name, value)
        if ours not in KNOWN_NAMES - {"config"}:
            raise ConfigError(f"{path}: unknown key {name}{did_you_mean(name, KNOWN_NAMES)}")
        found[ours] = Setting(meant, f"{path}: {name}")
    return found


# --- dataclasses --------------------------------------------------------------------------------------------------


def build(component: type[T], values: Mapping[str, Any], **fixed: Any) -> T:
    """The dataclass and its nested components from flat values; `fixed` fields are set as they are."""
    arguments: Values = dict(fixed)
    hints = typing.get_type_hints(component)
    for field in dataclasses.fields(component):  # type: ignore[arg-type]
        if field.name in COMPONENTS and hints[field.name] is COMPONENTS[field.name]:
            arguments[field.name] = build(COMPONENTS[field.name], values)
        elif field.name in values and field.name not in arguments:
            arguments[field.name] = values[field.name]
    return component(**arguments)


def from_command_line(
    options: Mapping[str, Option], arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> Values:
    return gather(options, vars(arguments), environ)


def select(options: Iterable[str], values: Mapping[str, Any]) -> Values:
    """The part of `values` that a process with these options takes."""
    return {name: values[name] for name in options if name in values}


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for child processes: without the options, which they get from their plan."""
    return {
        key: value for key, value in environ.items() if not key.startswith(ENV_PREFIX) or _is_service_link(key, value)
    }
