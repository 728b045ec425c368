"""Where a model's chat templates come from, and the special tokens that they write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.engine.contracts.errors import ConfigError, InvalidRequestError
from tandem.engine.contracts.generation_config import read_json_object
from tandem.router.chat.template import ChatTemplate

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"  # names in a tokenizer_config.json that has several


class ChatTemplates:
    """A model's templates: none, one, or one of its own for requests with tools.

    `given` is a file or a template itself; it takes the place of the model's own. Raises ConfigError when it can't be
    used. The model's own may be broken: then chat is refused with the reason, and all else is served.
    """

    def __init__(self, folder: Path, given: str = "") -> None:
        config = read_json_object(folder / "tokenizer_config.json") or {}
        special = _special_tokens(config, read_json_object(folder / "special_tokens_map.json") or {})
        self._facts: dict[str, Any] = {
            name: value for name, value in config.items() if isinstance(value, str | int | float)
        }
        self._facts |= special
        self._made: dict[str, ChatTemplate] = {}
        self._problem = (
            "the model has no chat template; start the router with --chat-template FILE, or use /v1/completions"
        )
        if given:
            self._made[DEFAULT] = ChatTemplate(_text_of(given), f"--chat-template {given[:80]}", special)
            return
        try:
            for name, source in _own(folder, config).items():
                self._made[name] = ChatTemplate(source, f"the chat template of {folder}", special)
        except (ConfigError, OSError, ValueError) as error:
            self._made.clear()
            self._problem = str(error)

    @property
    def source(self) -> str:
        """The text of all these templates together."""
        return "\n".join(template.source for template in self._made.values())

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        """What tokenizer_config.json says in single values, special tokens as text, and the template of plain chat."""
        template = self.choose(has_tools=False).source if self._made else None
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self._facts, "chat_template": template}

    def choose(self, has_tools: bool) -> ChatTemplate:
        """The template for a request with or without tools. Raises InvalidRequestError when there is none."""
        if not self._made:
            raise InvalidRequestError(self._problem, param="messages")
        if has_tools and WITH_TOOLS in self._made:
            return self._made[WITH_TOOLS]
        return self._made.get(DEFAULT) or next(iter(self._made.values()))


def _text_of(given: str) -> str:
    if "{{" in given or "{%" in given:
        return given
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--chat-template {given[:200]}: neither a file that can be read nor a template ({error})"
        ) from None


def _own(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        found = {DEFAULT: path.read_text(encoding="utf-8")}
        more = folder / "additional_chat_templates"
        return found | {file.stem: file.read_text(encoding="utf-8") for file in sorted(more.glob("*.jinja"))}
    said = config.get("chat_template")
    if isinstance(said, str):
        return {DEFAULT: said}
    named = [entry for entry in said if isinstance(entry, dict)] if isinstance(said, list) else []
    return {str(entry.get("name")): str(entry.get("template")) for entry in named}


def _special_tokens(config: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in SPECIAL:
        value = config.get(name) or beside.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
