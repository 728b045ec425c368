"""Prompts as people write them: text, token ids, a mapping with either, or a list of any of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

PromptInput: TypeAlias = str | Sequence[int] | Mapping[str, Any]

_KINDS = 'a prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}'


def read_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[str | list[int]]:
    """Each prompt as its text or its token ids. ValueError where one is neither."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [read_prompt(prompts)]  # type: ignore[arg-type]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"not a prompt: {prompts!r:.80}; {_KINDS}")
    return [read_prompt(prompt) for prompt in prompts]  # type: ignore[arg-type]


def read_prompt(prompt: PromptInput) -> str | list[int]:
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids"}
        if unknown:
            raise ValueError(f"a prompt with {', '.join(sorted(unknown))} can't be served: {_KINDS}")
        prompt = prompt.get("prompt_token_ids") or prompt.get("prompt") or ""
    if isinstance(prompt, str):
        return prompt
    if not _are_token_ids(prompt):
        raise ValueError(f"not a prompt: {prompt!r:.80}; {_KINDS}")
    return list(prompt)


def _are_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(each) is int for each in prompt)
