"""The reference of the `tandem` command: a page for each subcommand, with every option of its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tandem.deploy.cli import PRECEDENCE, make_parser
from tandem.deploy.command_line.flags import ENV_PREFIX
from tandem.deploy.site.tables import cell, table

FOLDER = "reference/commands"
_TO_ROOT = "../../"


def command_pages() -> dict[str, str]:
    """Markdown by the page's path."""
    (found,) = (action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in found._choices_actions}
    pages = {name: _page(name, helps[name], command) for name, command in found.choices.items()}
    rows = [[f"[`tandem {name}`]({name}.md)", cell(helps[name], _TO_ROOT)] for name in pages]
    index = f"# Commands\n\n{cell(PRECEDENCE, _TO_ROOT)}\n\n{table(('command', 'what it does'), rows)}"
    return {f"{FOLDER}/{name}.md": text for name, text in {"index": index, **pages}.items()}


def _page(name: str, text: str, command: argparse.ArgumentParser) -> str:
    usage = command.format_usage().removeprefix("usage: ").strip()
    parts = [f"# tandem {name}", f"{text[0].upper()}{cell(text[1:], _TO_ROOT)}.", f"```text\n{usage}\n```"]
    for group in command._action_groups:
        rows = list(_rows(group, command))
        if rows:
            title = (group.title or "").replace("positional arguments", "arguments")
            parts += [f"## {title.capitalize()}", table(("option", "what it says"), rows)]
    return "\n\n".join(parts)


def _rows(group: argparse._ArgumentGroup, command: argparse.ArgumentParser) -> Iterator[list[str]]:
    formatter = command._get_formatter()
    settable = command.get_default("options") or {}
    for action in group._group_actions:
        if action.help == argparse.SUPPRESS:
            continue
        called = f"`{formatter._format_action_invocation(action)}`".replace("|", r"\|")
        variable = f"<br>`{ENV_PREFIX}{action.dest.upper()}`" if action.dest in settable else ""
        yield [called + variable, cell(formatter._expand_help(action), _TO_ROOT)]
