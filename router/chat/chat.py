"""What a served model can do with conversations: prompts out of them, parsers for the answers."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.contracts.config import RouterOptions
from tandem.engine.contracts.errors import InvalidRequestError
from tandem.engine.contracts.wire.media import MediaItem
from tandem.router.chat import thinking
from tandem.router.chat.chat_body import ChatBody, ChatTokenizeBody
from tandem.router.chat.conversation import ContentForm, as_templates_expect, called_tools
from tandem.router.chat.deltas import CallArguments, CallStart, Delta, OutputParser, Reasoning, merged
from tandem.router.chat.parsers import CALL_PARSERS, HARMONY, NONE, choose_parsers
from tandem.router.chat.template_source import ChatTemplates
from tandem.router.media.parts import ReadMedia, expanded
from tandem.router.structured.answer import answer_of
from tandem.router.structured.calls import ChatGrammar, Thinking
from tandem.router.structured.parts import Part
from tandem.router.structured.spelling import Spelling
from tandem.router.text.completion import ModelFacts, cut_side, tokenize_text
from tandem.router.text.tokenizer import Tokenizer

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as its template renders it, and the token ids of that text."""

    text: str
    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()


class Chat:
    """Turns conversations into prompts, and answers back into messages. Raises ConfigError for a template or parser
    that can't be used."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, options: RouterOptions) -> None:
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(folder, options.chat_template)
        self.parsers = choose_parsers(options.tool_call_parser, options.reasoning_parser, self._templates.source)
        self._spelling = Spelling(tokenizer.mark_ids)
        self.shown_ids = tokenizer.special_ids(self.parsers.markers)

    @property
    def tokenizer_info(self) -> dict[str, Any]:
        return self._templates.tokenizer_info

    def output(self, body: ChatBody, prompt: str) -> ChatOutput:
        """A reader for one answer to `prompt`."""
        return ChatOutput(self.parsers.make(body.callable_names, prompt), body)

    def call_id(self) -> str:
        if self.parsers.calls != NONE and CALL_PARSERS[self.parsers.calls].has_short_ids:
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"

    def check_tools(self, body: ChatBody) -> None:
        """Raises InvalidRequestError when calls of tools could be neither asked for nor read."""
        if body.callable_names is None:
            return
        if self.parsers.calls == NONE:
            raise InvalidRequestError(
                "nobody knows how this model writes calls of tools: start the router with --tool-call-parser "
                f"({', '.join(CALL_PARSERS)})",
                param="tools",
            )
        if not self._templates.choose(has_tools=True).takes_tools:
            raise InvalidRequestError(
                "the model's chat template has no place for tools: start the router with a --chat-template that has",
                param="tools",
            )

    def grammar(self, body: ChatBody, prompt: str) -> tuple[list[Part], str] | None:
        """(grammar that an answer to `prompt` must follow, field that asks for it); None: the answer is free. Raises
        InvalidRequestError."""
        answer, names = answer_of(body, self._spelling), body.forced_names or body.callable_names or ()
        tools = [tool for tool in called_tools(body.tools or ()) if tool.name in names]
        form = None
        if tools:
            form = CALL_PARSERS[self.parsers.calls].form(self._templates.source, self._spelling.marks)
        one_call = body.parallel_tool_calls is False or isinstance(body.tool_choice, dict)
        asked = ChatGrammar(
            self._spelling,
            answer,
            tools,
            form,
            must_call=body.forced_names is not None,
            one_call=one_call or self.parsers.calls == HARMONY,
        )
        if asked.is_free:
            return None
        if asked.excludes_itself:
            raise InvalidRequestError(
                "this model's calls of tools begin as JSON does: what the answer must be can't be told from them; give "
                "tool_choice as none or required",
                param="tool_choice",
            )
        if HARMONY in (self.parsers.calls, self.parsers.reasoning):
            parts = asked.channel_parts()
        else:
            parts = asked.parts(Thinking(thinking.BEGIN, thinking.END, self.parsers.opening(prompt)))
        return parts, answer.param if answer is not None and not asked.must_call else "tools"

    def prompt(
        self, body: ChatBody | ChatTokenizeBody, facts: ModelFacts, media: ReadMedia | None = None
    ) -> ChatPrompt:
        """Renders and tokenizes; long conversations belong on a thread. `media`: what was read of the conversation's
        parts that aren't text. Raises InvalidRequestError."""
        wants_tools = body.tools and not (isinstance(body, ChatBody) and body.tool_choice == "none")
        template = self._templates.choose(bool(wants_tools))
        form = None
        if media is not None or facts.media_kinds:
            form = ContentForm(template.takes_parts, "" if media is None else media.placeholder)
        messages = as_templates_expect(body.messages, template.knows_developer, form)
        variables: dict[str, Any] = {"tools": body.tools if wants_tools else None, "documents": None}
        if isinstance(body, ChatBody):
            variables["documents"] = body.documents
            if body.reasoning_effort is not None:
                variables["reasoning_effort"] = body.reasoning_effort
        variables |= body.chat_template_kwargs or {}
        opens = body.add_generation_prompt
        variables["add_generation_prompt"] = not body.continue_final_message if opens is None else opens
        if body.continue_final_message:
            text = template.render_open(messages, variables)
        else:
            text = template.render(messages, variables)
        cut = cut_side(body) if isinstance(body, ChatBody) else None
        token_ids = tokenize_text(text, self._tokenizer, facts, bool(body.add_special_tokens), cut)
        return ChatPrompt(text, token_ids) if media is None else ChatPrompt(text, *expanded(token_ids, media))


class ChatOutput:
    """Reads one answer's text with the parser."""

    def __init__(self, parser: OutputParser, body: ChatBody) -> None:
        self._parser = parser
        self._one_call = body.parallel_tool_calls is False
        self._hides_reasoning = body.include_reasoning is False
        self.num_calls = self.num_reasoning_tokens = 0
        self.are_reasoning: list[bool] = []  # which tokens of the newest piece are

    def read(self, texts: Sequence[str], num_tokens: int, is_last: bool) -> list[Delta]:
        """Reads the texts of a piece's tokens one by one, since reasoning may end, or begin, at any of them; of a piece
        without tokens, its one text."""
        deltas: list[Delta] = []
        self.are_reasoning = []
        for text in texts:
            deltas += self._parser.feed(text)
            self.are_reasoning.append(self._parser.is_reasoning)
        self.num_reasoning_tokens += sum(self.are_reasoning[:num_tokens])
        if is_last:
            deltas += self._parser.finish()
        return merged([delta for delta in deltas if self._is_shown(delta)])

    def _is_shown(self, delta: Delta) -> bool:
        if isinstance(delta, CallStart | CallArguments):
            self.num_calls = max(self.num_calls, delta.index + 1)
            return delta.index == 0 or not self._one_call
        return not (isinstance(delta, Reasoning) and self._hides_reasoning)

    def finish_reason(self, said: str) -> str:
        return "tool_calls" if said == "stop" and self.num_calls else said
