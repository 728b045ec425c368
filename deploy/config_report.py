"""`tandem config`: prints the settings in force for a command, and where each is set, as a file that --config takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tandem.deploy.command_line.flags import SECRET
from tandem.deploy.command_line.option import Option
from tandem.deploy.options import settings


def report(name: str, options: Mapping[str, Option], given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """The settings as YAML, a line for each option with its origin as a comment, by groups. Raises ConfigError that
    names a wrong key."""
    found = settings(options, given, environ)
    lines, group = [f"# tandem {name}: in force, and where it is set"], ""
    for option in options.values():
        if option.group != group:
            group = option.group
            lines += ["", f"# {group}"]
        setting = found.get(option.name)
        value, origin = (setting.value, setting.origin) if setting is not None else (option.default, "default")
        if option.name in SECRET and value:
            lines.append(f"# {option.name}: not shown  # {origin}")
        else:
            lines.append(f"{option.name}: {json.dumps(value)}  # {origin}")
    return "\n".join(lines)
