"""Which parser reads a model's output: named by the operator, or told by what the model's template writes itself."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

from tandem.engine.contracts.errors import ConfigError
from tandem.router.chat import harmony, hermes, llama, mistral, thinking
from tandem.router.chat.call_parser import CallParser
from tandem.router.chat.deepseek import BEGIN as DEEPSEEK_BEGIN
from tandem.router.chat.deepseek import DeepSeekParser
from tandem.router.chat.deltas import OutputParser, PlainText
from tandem.router.chat.harmony import HarmonyParser
from tandem.router.chat.hermes import HermesParser
from tandem.router.chat.llama import LlamaParser
from tandem.router.chat.mistral import MistralParser
from tandem.router.chat.thinking import ThinkingParser
from tandem.router.structured.calls import Opening

AUTO, NONE = "auto", "none"
HARMONY, QWEN3, DEEPSEEK_R1 = "openai", "qwen3", "deepseek_r1"
CALL_PARSERS: Mapping[str, type[CallParser]] = {
    "hermes": HermesParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    HARMONY: HarmonyParser,
    "llama3_json": LlamaParser,
}
REASONING_PARSERS = (QWEN3, DEEPSEEK_R1, HARMONY)
# Other names of the same parsers, as users of other servers know them.
ALIASES = {
    "openai_gptoss": HARMONY,
    "gpt-oss": HARMONY,
    "gpt_oss": HARMONY,
    "harmony": HARMONY,
    "qwen25": "hermes",
    "qwen": "hermes",
    "llama3": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "deepseek_v31": "deepseek_v3",
    "deepseek-r1": DEEPSEEK_R1,
}
# In this order: the first whose mark a template holds.
_CALL_MARKS = (
    ("hermes", (hermes.BEGIN,)),
    ("mistral", (mistral.BEGIN,)),
    ("deepseek_v3", (DEEPSEEK_BEGIN,)),
    (HARMONY, (harmony.CHANNEL,)),
    ("llama3_json", (llama.TAG, '"parameters"')),
)
_REASONING_MARKS = ((HARMONY, (harmony.CHANNEL,)), (QWEN3, (thinking.BEGIN, thinking.END)))


@dataclass(frozen=True, slots=True)
class Parsers:
    """The names of the parsers of calls and of reasoning; "none" where there is none."""

    calls: str
    reasoning: str

    @property
    def markers(self) -> tuple[str, ...]:
        """Special tokens whose text the parsers must see."""
        of_calls = CALL_PARSERS[self.calls].markers if self.calls != NONE else ()
        of_reasoning: tuple[str, ...] = ()
        if self.reasoning != NONE:
            of_reasoning = HarmonyParser.markers if self.reasoning == HARMONY else (thinking.BEGIN, thinking.END)
        return (*of_calls, *of_reasoning)

    def make(self, names: Set[str] | None, prompt: str) -> OutputParser:
        """A parser for one answer to `prompt`. `names` are the tools that may be called; None: nothing is a call."""
        wants_calls = names is not None and self.calls != NONE
        if HARMONY in (self.reasoning, self.calls):
            return HarmonyParser(names or set(), self.reasoning == HARMONY, wants_calls and self.calls == HARMONY)
        inner: OutputParser = PlainText()
        if wants_calls:
            inner = CALL_PARSERS[self.calls](names or set())
        if self.reasoning == NONE:
            return inner
        return ThinkingParser(inner, self.opening(prompt) == "open")

    def opening(self, prompt: str) -> Opening:
        """Whether an answer to `prompt` begins within `<think>`, or may."""
        end = prompt.rstrip()
        if self.reasoning in (NONE, HARMONY) or end.endswith(thinking.END):
            return "no"
        return "open" if end.endswith(thinking.BEGIN) or self.reasoning == DEEPSEEK_R1 else "maybe"


def choose_parsers(calls: str, reasoning: str, template: str) -> Parsers:
    """The named parsers, or for "auto" those whose marks `template` holds. Raises ConfigError for an unknown name."""
    calls, reasoning = ALIASES.get(calls, calls), ALIASES.get(reasoning, reasoning)
    _check("tool-call-parser", calls, CALL_PARSERS)
    _check("reasoning-parser", reasoning, REASONING_PARSERS)
    if calls == AUTO:
        calls = _marked(_CALL_MARKS, template)
    if reasoning == AUTO:
        reasoning = _marked(_REASONING_MARKS, template)
    return Parsers(calls, reasoning)


def _marked(marks: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, found in marks if any(mark in template for mark in found)), NONE)


def _check(option: str, name: str, known: Mapping[str, object] | tuple[str, ...]) -> None:
    if name not in (AUTO, NONE, *known):
        raise ConfigError(f"--{option} {name}: there are {', '.join((AUTO, NONE, *known))}")
