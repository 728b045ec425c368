"""The body of /v1/responses, and the conversation that it asks for."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat.chat_body import ChatBody, ConversationBody, MaxTokens, check_chat
from tandem.router.responses.input_items import messages_of, tools_of
from tandem.router.text.body_reader import BodyReader
from tandem.router.text.openai_api import GenerationBody

LOGPROBS = "message.output_text.logprobs"
# Fields of every body that makes tokens for which an answer here has no place.
WITHOUT_PLACE = ("prompt_logprobs", "return_token_ids")
# Fields of a conversation -> what this body calls them.
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
}
# Places in a conversation, as messages write them -> in this body.
PLACES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
}
_PLACE = re.compile(rf"\b({'|'.join(map(re.escape, PLACES))})\b")


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Summaries aren't made: the reasoning itself is part of the answer."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The field `text` of a body: which form the answer has."""

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesBody(ConversationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/responses as it is on the wire."""

    input: Annotated[str, Meta(min_length=1)] | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    n: Literal[1] | None = None
    instructions: str | None = None
    max_output_tokens: MaxTokens | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    truncation: Literal["disabled"] | None = None
    max_tool_calls: int | None = None  # accepted, since it changes nothing here

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatBody:
        """The conversation that this body asks for. Raises InvalidRequestError, whose `param` is this body's field."""
        try:
            chat = self._as_chat()
            check_chat(chat)
        except InvalidRequestError as error:
            raise self.renamed(error) from error
        return chat

    def renamed(self, error: InvalidRequestError) -> InvalidRequestError:
        """The same error, with the name that this body has for the field."""
        if error.message.startswith("response_format") and (self.text is None or self.text.format is None):
            return error  # this body has that field, too
        message = _PLACE.sub(lambda found: PLACES[found[0]], error.message, count=1)  # what follows may be the client's
        return type(error)(message, param=NAMES.get(error.param or "", error.param))

    def _as_chat(self) -> ChatBody:
        shared = {field: getattr(self, field) for field in GenerationBody.__struct_fields__}
        text = self.text or TextOptions()
        if text.format is not None:
            shared["response_format"] = _response_format(text.format)
        return ChatBody(
            **shared,
            messages=messages_of(self.input, self.instructions),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            tools=tools_of(self.tools or ()) or None,
            tool_choice=_tool_choice(self.tool_choice),
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            chat_template_kwargs=self.chat_template_kwargs,
        )


def parse_responses(bodies: BodyReader, raw: bytes) -> ResponsesBody:
    """Decodes and checks a body. Raises InvalidRequestError, whose `param` names the field."""
    body = bodies.read(ResponsesBody, raw)
    for field in WITHOUT_PLACE:
        if getattr(body, field):
            _bad(field, f"{field} is not supported: an answer has no place for it; use /v1/chat/completions")
    if body.response_format is not None and body.text is not None and body.text.format is not None:
        _bad("text", "text.format and response_format both say what the answer must be; give one")
    return body


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = str(choice.get("type"))[:64]
        _bad("tool_choice", f"tool_choice.type is {kind!r}; it must be none, auto, required or a function's name")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(given: dict[str, Any]) -> dict[str, Any]:
    """The response format as chat has it, where the schema is one level deeper."""
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
