"""Options as flags of a command, and back: the arguments and the environment that give a child its options."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from tandem.deploy.command_line.foreign_names import SAME, SHORT, Foreign
from tandem.deploy.command_line.option import Option

ENV_PREFIX = "TANDEM_"
SECRET = ("redis_url", "api_key")  # a URL may hold a password


def add_flags(parser: argparse.ArgumentParser, options: Mapping[str, Option]) -> None:
    """One flag an option, under each of its names; flags that were not given leave no attribute."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options.values():
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        arguments: dict[str, Any] = {"default": argparse.SUPPRESS, "help": option.help_with_default}
        if option.is_positional:
            group.add_argument(option.name, nargs="?", metavar=option.name.upper(), **arguments)
            if option.name in ("model", "url"):  # as other commands have it, too
                flags = [option.flag, *_other_flags(option.name)]
                group.add_argument(*flags, dest=option.name, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
            continue
        if option.kind is bool:
            arguments["action"] = argparse.BooleanOptionalAction
        elif option.kind is tuple:
            arguments |= {"action": "append", "metavar": "TEXT"}
        else:
            arguments |= {"type": option.from_flag, "choices": option.choices or None}
            arguments["metavar"] = None if option.choices else option.kind.__name__.upper().replace("STR", "TEXT")
        group.add_argument(option.flag, *_other_flags(option.name), dest=option.name, **arguments)
        unset: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS}
        for flag in _other_flags(f"not {option.name}"):
            group.add_argument(flag, action="store_false", help=f"no {option.flag}", **unset)
            group.add_argument("--no-" + flag[2:], action="store_true", help=argparse.SUPPRESS, **unset)


def _other_flags(ours: str) -> list[str]:
    short = [SHORT[ours]] if ours in SHORT else []
    return short + ["--" + theirs.replace("_", "-") for theirs, same in SAME.items() if same == ours]


def add_foreign_flags(parser: argparse.ArgumentParser, foreign_options: Mapping[str, Foreign]) -> None:
    """Adds other engines' flags that have no counterpart here, so that each can say why it is ignored or refused."""
    for name, foreign in foreign_options.items():
        flags = ["--" + name.replace("_", "-"), *([SHORT[name]] if name in SHORT else [])]
        nargs = None if foreign.takes_value else 0
        parser.add_argument(*flags, action=_Heed, foreign=foreign, nargs=nargs, help=argparse.SUPPRESS)
        if not foreign.takes_value:
            off = "--no-" + name.replace("_", "-")  # as it is
            parser.add_argument(off, action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Heed(argparse.Action):
    def __init__(self, foreign: Foreign, **kwargs: Any) -> None:
        super().__init__(**kwargs, default=argparse.SUPPRESS)
        self._foreign = foreign

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        self._foreign.heed(str(option_string), values if self._foreign.takes_value else True)


def to_arguments(options: Mapping[str, Option], values: Mapping[str, Any]) -> list[str]:
    """Flags that reproduce `values` in a child process, but for the secret ones; defaults are left out."""
    arguments: list[str] = [str(values["model"])] if "model" in values else []
    for name, value in values.items():
        option = options.get(name)
        if option is None or name == "model" or name in SECRET or value == option.default:
            continue
        if option.kind is bool:
            arguments.append(option.flag if value else option.flag.replace("--", "--no-", 1))
        elif option.kind is tuple:
            arguments += [f"{option.flag}={part}" for part in value]
        else:
            arguments.append(f"{option.flag}={value}")
    return arguments


def to_environment(options: Mapping[str, Option], values: Mapping[str, Any]) -> dict[str, str]:
    """The secret ones of `values`, for a child's environment, which only its own user can read."""
    return {ENV_PREFIX + name.upper(): str(values[name]) for name in SECRET if name in options and values.get(name)}
