"""argparse with short errors: one line of usage, the fault, and the flag that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from tandem.deploy.options import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """Flags are never abbreviated: a flag that comes later would change what a beginning of its name means."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0].partition("=")[0])
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}; `{self.prog} --help` lists them all\n")

    def _refuse(self, name: str) -> NoReturn:
        if not name.startswith("-"):
            self.error(f"unexpected argument {name!r}")
        self.error(f"unknown option {name}{did_you_mean(name, self._option_string_actions)}")
