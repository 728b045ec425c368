"""The body of /v1/chat/completions, and the completion that it asks for."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NoReturn

import msgspec
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.chat.conversation import tool_names
from tandem.router.text.body_reader import SAYS_NOTHING, BodyReader
from tandem.router.text.openai_api import (
    CompletionBody,
    GenerationBody,
    NumLogprobs,
    TokenizeBody,
    check_combinations,
    parse_body,
)

MaxTokens = Annotated[int, Meta(ge=1, lt=1 << 31)]
Messages = Annotated[list[dict[str, Any]], Meta(min_length=1)]

# Template variables that are set by the router, so that a body must not set them.
RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)


class ChatTokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /tokenize with messages."""

    messages: Messages
    model: str | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class ConversationBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every body that asks for an answer in a conversation may say."""

    top_logprobs: NumLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # an extension
    # accepted, since they change nothing here
    store: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None


class ChatBody(ConversationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/chat/completions as it is on the wire."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    modalities: list[str] | None = None
    reasoning_effort: str | None = None
    # extensions
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool | None = None
    # accepted, since they change nothing here
    prediction: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None

    @property
    def forced_names(self) -> frozenset[str] | None:
        """Names of the tools of which one must be called; None: none needs to be."""
        if isinstance(self.tool_choice, dict):
            return frozenset({self.tool_choice["function"]["name"]})
        return self.callable_names if self.tool_choice == "required" else None

    @property
    def callable_names(self) -> frozenset[str] | None:
        """Names of the tools that may be called; None: none may."""
        return tool_names(self.tools) if self.tools and self.tool_choice != "none" else None

    def as_completion(self) -> CompletionBody:
        """The completion that this body asks for, without its prompt. Raises InvalidRequestError."""
        shared = {field: getattr(self, field) for field in GenerationBody.__struct_fields__}
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        body = CompletionBody(**shared, prompt=msgspec.Raw(b""), max_tokens=most, logprobs=num_logprobs)
        check_combinations(body)
        return body


def parse_chat(bodies: BodyReader, raw: bytes) -> ChatBody:
    """Decodes and checks a body. Raises InvalidRequestError, whose `param` names the field."""
    body = bodies.read(ChatBody, raw)
    check_chat(body)
    return body


def check_chat(body: ChatBody) -> None:
    """Raises InvalidRequestError for what isn't built, and for fields that contradict each other."""
    if set(body.modalities or ()) - {"text"}:
        _bad("modalities", "modalities may be text alone: this server makes nothing else")
    if body.top_logprobs and not body.logprobs:
        _bad("top_logprobs", "top_logprobs is only allowed when logprobs is true")
    _check_tool_choice(body)
    check_opening(body)


def _check_tool_choice(body: ChatBody) -> None:
    choice = body.tool_choice
    names = tool_names(body.tools or ())
    if choice is not None and choice != "none" and not names:
        _bad("tool_choice", "tool_choice is only allowed when there are tools")
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            _bad(
                "tool_choice",
                "tool_choice must be none, auto, required or {'type': 'function', 'function': {'name': …}}",
            )
        if name not in names:
            _bad("tool_choice", f"tool_choice names {name[:64]!r}, which is none of the tools")


def check_opening(body: ChatBody | ChatTokenizeBody) -> None:
    """Raises InvalidRequestError when fields contradict each other on how the prompt is made."""
    if body.continue_final_message and body.add_generation_prompt:
        _bad("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
    for name in sorted(RESERVED & set(body.chat_template_kwargs or ())):
        _bad("chat_template_kwargs", f"chat_template_kwargs may not hold {name}, which has a place of its own")


def parse_tokenize(bodies: BodyReader, raw: bytes) -> TokenizeBody | ChatTokenizeBody:
    """A body of /tokenize, whose kind is told by whether it has `messages` or `prompt`. Raises InvalidRequestError."""
    if bytes(parse_body(_Peek, raw).messages) in (b"", *SAYS_NOTHING):
        return bodies.read(TokenizeBody, raw)
    body = bodies.read(ChatTokenizeBody, raw)
    tool_names(body.tools or ())
    check_opening(body)
    return body


class _Peek(msgspec.Struct):
    messages: msgspec.Raw = msgspec.Raw(b"")


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
