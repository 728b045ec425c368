"""Configuration from command line, environment, YAML and defaults, in that order of precedence.

Every field of engine/config.py is one option: `--max-num-seqs`, `TANDEM_MAX_NUM_SEQS`, `max_num_seqs:` in the YAML
file. Names are flat; no two components give one name two meanings for the same process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.deploy.option_help import OPTION_HELP
from tandem.engine.config import CacheOptions, ModelOptions, NodeOptions, RouterOptions, SchedulerOptions, Timeouts
from tandem.engine.errors import ConfigError

DEMO_MODEL = Path(__file__).resolve().parent / "demo_model"
ENV_PREFIX = "TANDEM_"
COMPONENTS: dict[str, type] = {
    "model": ModelOptions,
    "cache": CacheOptions,
    "scheduler": SchedulerOptions,
    "timeouts": Timeouts,
}
# Kubernetes puts these into every container for a Service called tandem or tandem-something.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$")

T = TypeVar("T")
Values = dict[str, Any]


@dataclass(frozen=True)
class Option:
    """One field of one or more components."""

    name: str
    kind: type  # int, float, str, bool or tuple (of str)
    default: Any
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--node" if self.name == "nodes" else "--" + self.name.replace("_", "-")

    def parse(self, given: Any, origin: str) -> Any:
        """`given` from the environment (text) or YAML (typed). Raises ConfigError that names `origin`."""
        value: Any
        if self.kind is bool:
            value = _BOOLS.get(str(given).lower())
        elif self.kind is tuple:
            parts = given.split(",") if isinstance(given, str) else given
            value = tuple(str(part).strip() for part in parts) if isinstance(parts, list | tuple) else None
        else:
            value = _number_or_text(self.kind, given)
        if value is None or (self.choices and value not in self.choices):
            wanted = " or ".join(self.choices) or _KIND_NAMES[self.kind]
            raise ConfigError(f"{origin} is {given!r}: it must be {wanted}")
        return value


_KIND_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    tuple: "a list",
    str: "text",
}
_BOOLS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _number_or_text(kind: type, given: Any) -> Any:
    if isinstance(given, bool) or (kind is int and isinstance(given, float)) or isinstance(given, list | dict):
        return None
    try:
        return kind(given)
    except (TypeError, ValueError):
        return None


def options_of(*components: type) -> dict[str, Option]:
    """The options of configuration dataclasses; where two share a name, the first one's default holds."""
    found: dict[str, Option] = {}
    for component in components:
        hints = typing.get_type_hints(component)
        for field in dataclasses.fields(component):
            if field.name in COMPONENTS and hints[field.name] is COMPONENTS[field.name]:
                continue
            if field.name != "role":
                found.setdefault(field.name, _option(field, hints[field.name]))
    return found


def _option(field: dataclasses.Field[Any], hint: Any) -> Option:
    default = "" if field.default is dataclasses.MISSING else field.default
    if typing.get_origin(hint) is typing.Literal:
        return Option(field.name, str, default, typing.get_args(hint))
    return Option(field.name, tuple if typing.get_origin(hint) is tuple else hint, default)


NODE_OPTIONS = options_of(ModelOptions, CacheOptions, SchedulerOptions, Timeouts, NodeOptions)
ROUTER_OPTIONS = options_of(ModelOptions, Timeouts, RouterOptions)
_PER_PROCESS = ("node_id", "device_index", "ready_fd", "launcher_address", "nodes")
SERVE_OPTIONS = {
    **{name: option for name, option in {**NODE_OPTIONS, **ROUTER_OPTIONS}.items() if name not in _PER_PROCESS},
    "prefill": Option("prefill", int, 0),
    "decode": Option("decode", int, 0),
    "prefill_tensor_parallel_size": Option("prefill_tensor_parallel_size", int, 0),
    "decode_tensor_parallel_size": Option("decode_tensor_parallel_size", int, 0),
}
KNOWN_NAMES = frozenset(NODE_OPTIONS) | frozenset(ROUTER_OPTIONS) | frozenset(SERVE_OPTIONS) | {"config"}


# --- command line -------------------------------------------------------------------------------------------------


def add_flags(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    """One flag an option, with its default in the help; flags that were not given leave no attribute."""
    for option in options.values():
        text = OPTION_HELP[option.name]
        if option.name == "model":
            parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=text)
            continue
        shown = "" if option.default in ("", ()) else f" (default: {option.default})"
        arguments: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": text + shown}
        if option.kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        elif option.kind is tuple:
            arguments |= {"action": "append", "metavar": "ADDRESS"}
        elif option.choices:
            arguments["choices"] = option.choices
        else:
            arguments |= {"type": option.kind, "metavar": option.kind.__name__.upper().replace("STR", "TEXT")}
        parser.add_argument(option.flag, **arguments)
    parser.add_argument(
        "--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file with options by name (max_num_seqs: 32)"
    )


def to_arguments(options: Mapping[str, Option], values: Mapping[str, Any]) -> list[str]:
    """Flags that reproduce `values` in a child process; defaults are left out."""
    arguments: list[str] = [str(values["model"])] if "model" in values else []
    for name, value in values.items():
        option = options.get(name)
        if option is None or name == "model" or value == option.default:
            continue
        if option.kind is bool:
            arguments.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        elif option.kind is tuple:
            arguments += [f"{option.flag}={part}" for part in value]
        else:
            arguments.append(f"{option.flag}={value}")
    return arguments


# --- the three sources ------------------------------------------------------------------------------------------


def gather(options: Mapping[str, Option], given: Mapping[str, Any], environ: Mapping[str, str]) -> Values:
    """The value of every option that is set anywhere. Raises ConfigError that names a wrong or unknown key."""
    from_env = _read_environment(environ)
    file = given.get("config") or from_env.pop("config", "")
    merged: Values = {}
    for source, origin in ((_read_yaml(Path(file)) if file else {}, f"{file}: {{}}"), (from_env, ENV_PREFIX + "{}")):
        for name, value in source.items():
            if name in options:
                shown = name.upper() if origin.startswith(ENV_PREFIX) else name
                merged[name] = options[name].parse(value, origin.format(shown))
    for name, value in given.items():
        if name in options:
            merged[name] = tuple(value) if options[name].kind is tuple else value
    merged.setdefault("model", str(DEMO_MODEL))
    return merged


def _read_environment(environ: Mapping[str, str]) -> Values:
    found: Values = {}
    for key, value in environ.items():
        name = key.removeprefix(ENV_PREFIX).lower()
        if not key.startswith(ENV_PREFIX) or _is_service_link(key, value):
            continue
        if name not in KNOWN_NAMES:
            raise ConfigError(f"unknown environment variable {key}: no option is called {name}{_did_you_mean(name)}")
        found[name] = value
    return found


def _is_service_link(key: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(key)) and (key != "TANDEM_PORT" or value.startswith(("tcp://", "udp://")))


def _read_yaml(path: Path) -> Values:
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
    found = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name in found:
        if name not in KNOWN_NAMES - {"config"}:
            raise ConfigError(f"{path}: unknown key {name}{_did_you_mean(name)}")
    return found


def _did_you_mean(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, KNOWN_NAMES, n=1)
    return f"; did you mean {close[0]}?" if close else ""


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
    """The environment for child processes: without the options, which they get as flags."""
    return {
        key: value for key, value in environ.items() if not key.startswith(ENV_PREFIX) or _is_service_link(key, value)
    }
