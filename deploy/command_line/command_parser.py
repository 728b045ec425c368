"""argparse with a short help, and errors of one line that name the fault and the flag that was probably meant."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from tandem.deploy.command_line.option import did_you_mean


class CommandParser(argparse.ArgumentParser):
    """Flags are never abbreviated: a flag that comes later would change what a beginning of its name means.

    `first` names the options that plain --help shows; None: all of them.
    """

    def __init__(self, *args: Any, first: Collection[str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "allow_abbrev": False, "add_help": False, "formatter_class": _Formatter})
        self._first = first
        what = "what people use first; all: every option; WORD: those about it" if first is not None else "this text"
        self.add_argument("-h", "--help", action=_Help, nargs="?", metavar="WORD", help=what)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0].partition("=")[0])
        return found, unknown

    def error(self, message: str) -> NoReturn:
        everything = "--help" if self._first is None else "--help=all"
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} {everything}` lists them all\n")

    def format_help(self) -> str:
        return self.help_on("")

    def help_on(self, word: str) -> str:
        """Help on what people use first (""), on everything ("all"), or on options that have to do with a word."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        num_shown = 0
        for group in self._action_groups:
            shown = [action for action in group._group_actions if self._is_shown(action, word, group.title or "")]
            num_shown += len(shown)
            formatter.start_section(group.title)
            formatter.add_arguments(shown)
            formatter.end_section()
        if word and not num_shown:
            self.error(f"no option has to do with {word!r}")
        if self._first is not None and not word:
            text = f"`{self.prog} --help=all` shows every option, `--help=WORD` those that have to do with a word."
            formatter.add_text(text)
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def _is_shown(self, action: argparse.Action, word: str, group: str) -> bool:
        if action.help == argparse.SUPPRESS:
            return False
        if word in ("", "all"):
            return word == "all" or self._first is None or action.dest in self._first or isinstance(action, _Help)
        texts = [*action.option_strings, action.dest, action.help or "", group]
        return any(word.lower().strip("-").replace("-", "_") in text.lower().replace("-", "_") for text in texts)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"unknown command {value!r}{did_you_mean(value, action.choices)}")
        super()._check_value(action, value)

    def _refuse(self, name: str) -> NoReturn:
        if not name.startswith("-"):
            self.error(f"unexpected argument {name!r}")
        shown = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        self.error(f"unknown option {name}{did_you_mean(name, shown)}")


class _Formatter(argparse.HelpFormatter):
    """What an option takes is said once, behind all of its names."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        takes = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {takes}"


class _Help(argparse.Action):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "dest": argparse.SUPPRESS, "default": argparse.SUPPRESS})

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        print(parser.help_on(values or ""), end="")
        parser.exit()
