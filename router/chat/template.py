"""Chat templates in Jinja's sandbox, set up as transformers does it, without transformers."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tandem.engine.contracts.errors import ConfigError, InvalidRequestError

Fields = Mapping[str, Any]

# Marks the end of the last message while it is rendered, if it is to be continued. Nobody writes such text.
END_MARK = "\ue000end of the last message\ue000"


class _GenerationTag(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks what to train on; here it is ignored."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, other than Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One template. `special` are the tokens that it may write, as `bos_token`. Raises ConfigError when it is no
    template; `origin` is where it came from."""

    def __init__(self, source: str, origin: str, special: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            used = meta.find_undeclared_variables(environment.parse(source))
        except Exception as error:  # syntax, or what compiling a nonsensical constant does
            raise ConfigError(f"{origin} is no chat template: {error}; give another with --chat-template") from None
        self.source, self._special = source, dict(special)
        self.takes_tools, self.knows_developer = "tools" in used, "developer" in source

    @cached_property
    def takes_parts(self) -> bool:
        """Whether content may be a list of parts. A template that doesn't know of them writes the list itself, or
        refuses it."""
        try:
            text = self.render([{"role": "user", "content": [{"type": "text", "text": "probe"}]}])
        except InvalidRequestError:
            return False
        return "probe" in text and "'text'" not in text

    def render(self, messages: Sequence[Fields], variables: Fields | None = None) -> str:
        """The prompt of a conversation. Raises InvalidRequestError with the template's objection to these messages."""
        try:
            return self._template.render({**self._special, **(variables or {}), "messages": messages})
        except Exception as error:  # whatever expressions of a template do to values of a request
            raise InvalidRequestError(
                f"the model's chat template refuses this conversation: {error}", param="messages"
            ) from None

    def render_open(self, messages: Sequence[Fields], variables: Fields | None = None) -> str:
        """The prompt up to the end of the last message's content, so that the model continues it."""
        last = messages[-1]
        content: Any = last["content"] or ""
        marked_content: Any = f"{content}{END_MARK} "
        if isinstance(content, list):
            part = content[-1] if content and content[-1]["type"] == "text" else {"type": "text", "text": ""}
            others = content[:-1] if part in content[-1:] else content
            marked_content = [*others, {**part, "text": f"{part['text']}{END_MARK} "}]
        marked = [*messages[:-1], {**last, "content": marked_content}]
        text = self.render(marked, variables)
        before, mark, after = text.rpartition(END_MARK)
        if not mark:
            raise InvalidRequestError(
                "continue_final_message: the model's chat template leaves the last message's content out",
                param="continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()  # a template that trims, trims its end, too
