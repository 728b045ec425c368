"""Grammars of answers: reasoning first, then calls of tools in the model's own way of writing, or text. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tandem.router.structured.answer import AnswerPart
from tandem.router.structured.parts import Part, lark_part, schema_part
from tandem.router.structured.spelling import TEXT, Spelling, lazy

ARGUMENTS = "arguments_"  # parts that hold a tool's arguments, and the tool's place
Opening = Literal["no", "maybe", "open"]  # whether an answer begins with reasoning; open: the prompt has begun it


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a model writes calls: `mark` begins each, or with `is_list` all of them, then comes `opening`. Around the
    arguments of a call stand `before` and `after`; `{name}` and `{json}`, the name as JSON, are filled in. Without a
    mark an answer that begins as JSON is a call."""

    before: str
    after: str = ""
    mark: str = ""
    separator: str = ""
    is_list: bool = False
    opening: str = ""
    closing: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. `strict`: its arguments follow `parameters`, a JSON schema."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Thinking:
    """The marks around reasoning, and whether an answer begins with it."""

    begin: str
    end: str
    opening: Opening


@dataclass(frozen=True, slots=True)
class ChatGrammar:
    """What an answer may be. `answer`: what its text must be, None: anything. `tools`: those that may be called, None:
    none may. `must_call`: the answer must be calls. `one_call`: at most one call."""

    spelling: Spelling
    answer: AnswerPart | None
    tools: Sequence[Tool] | None
    form: CallForm | None
    must_call: bool = False
    one_call: bool = False

    @property
    def is_free(self) -> bool:
        """Whether nothing is asked of the answer."""
        return self.answer is None and not self.must_call and not any(tool.strict for tool in self.tools or ())

    @property
    def excludes_itself(self) -> bool:
        """Whether calls could not be told from a text that is held to a grammar."""
        has_both = bool(self.tools) and self.answer is not None and not self.must_call
        return has_both and self.form is not None and not self.form.mark

    def parts(self, thinking: Thinking | None) -> list[Part]:
        """The grammar of answers that are text, perhaps with calls in it and reasoning before it."""
        rules = self._reasoning(thinking)
        begin = {"no": "", "maybe": "thought? ", "open": "thought "}["no" if thinking is None else thinking.opening]
        ways = "@answer"
        if self.tools:
            assert self.form is not None
            rules += self._calls(self.form)
            ways = "calls"
            if self.answer is not None and not self.must_call:
                ways = "calls | @answer"
            elif not self.must_call and self.form.mark:
                rules.append(lazy("lead", self.spelling.up_to(self.form.mark)))
                ways = "(lead block)* TEXT"
            elif not self.must_call:
                rules.append(r"OTHER: /[^{\s](.|\n)*/")
                ways = "calls | OTHER?"
        return self._whole([f"start: {begin}({ways})", *rules, TEXT])

    def channel_parts(self) -> list[Part]:
        """The grammar of answers of GPT-OSS, which are messages in channels."""
        say, ways, rules = self.spelling.lark, [], []
        if self.tools:
            assert self.form is not None
            rules += self._calls(self.form)
            ways.append("calls")
        if not self.must_call:
            ways.append(f"{say('<|channel|>final<|message|>')} {'TEXT' if self.answer is None else '@answer'}")
        note = f'{say("<|channel|>")} "analysis" {say("<|message|>")} noted {say("<|start|>assistant")}'
        rules += [f"note: {note}", lazy("noted", self.spelling.up_to("<|end|>"))]
        return self._whole([f"start: note* ({' | '.join(ways)})", *rules, TEXT])

    def _whole(self, rules: list[str]) -> list[Part]:
        parts = [{"name": "start", **lark_part("\n".join(rules))}]
        if self.answer is not None and not self.must_call:
            parts.append({"name": "answer", **self.answer.part})
        for i, tool in enumerate(self.tools or ()):
            parts.append({"name": f"{ARGUMENTS}{i}", **arguments_part(tool, self.must_call)})
        return parts

    def _reasoning(self, thinking: Thinking | None) -> list[str]:
        if thinking is None or thinking.opening == "no":
            return []
        begin = self.spelling.lark(thinking.begin) + ("?" if thinking.opening == "open" else "")
        return [f'thought: {begin} thinking ("\\n\\n" | "\\n")?', lazy("thinking", self.spelling.up_to(thinking.end))]

    def _calls(self, form: CallForm) -> list[str]:
        """Rules in Lark: `calls` are all calls of an answer, and `block` is what follows a mark within text."""
        say, tools = self.spelling.lark, self.tools or ()
        rules = [f"one: {' | '.join(f'one_{i}' for i in range(len(tools)))}"]
        for i, tool in enumerate(tools):
            as_json = json.dumps(tool.name, ensure_ascii=False)
            before = say(form.before.replace("{json}", as_json).replace("{name}", tool.name))
            rules.append(f"one_{i}: {before} @{ARGUMENTS}{i} {say(form.after)}")
        between = say(form.separator if form.is_list else form.separator + form.mark)
        block = "one" if form.is_list is False else f"{say(form.opening)} one ({between} one)* {say(form.closing)}"
        if form.is_list:
            only = f"{say(form.mark)} {say(form.opening)} one {say(form.closing)}"
            calls = only if self.one_call else f"{say(form.mark)} block"
        else:
            calls = f"{say(form.mark)} one" + ("" if self.one_call else f" ({between} one)*")
        return [f"calls: {calls}", f"block: {block}", *rules]


def arguments_part(tool: Tool, is_forced: bool) -> Part:
    """The grammar of a tool's arguments: its parameters where it is `strict` or forced, else any object."""
    parameters = tool.parameters if tool.parameters and (tool.strict or is_forced) else {}
    return schema_part({"type": "object", **parameters})
