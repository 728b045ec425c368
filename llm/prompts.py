"""Prompts as people write them: text, token ids, a mapping with either, or a list of any of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.llm.multi_modal import as_urls

PromptInput: TypeAlias = str | Sequence[int] | Mapping[str, Any]

_KINDS = 'a prompt is text, a list of token ids, {"prompt": text} or {"prompt_token_ids": [...]}'
_FIELDS = {"prompt", "prompt_token_ids", "multi_modal_data"}


# Fields of prompts, and arguments of calls, that other engines have: what to do instead.
REFUSED = {
    "lora_request": "it is an argument of the call, for all of its prompts",
    "multi_modal_uuids": "images and sounds are known by what they hold",
    "mm_processor_kwargs": "set them in preprocessor_config.json, in the model's folder",
    "prompt_embeds": "prompts are text or token ids",
    "encoder_prompt": "models with an encoder of their own aren't served",
    "cache_salt": "it is one of SamplingParams",
}


def refuse(given: Mapping[str, Any]) -> None:
    """Raises InvalidRequestError for the first field that is set and can't be served."""
    for name in REFUSED.keys() & given.keys():
        if given[name] is not None:
            raise InvalidRequestError(f"{name} is not supported: {REFUSED[name]}", param=name)


def each_prompt(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One prompt, or all of many, as they were given. Raises as `read_prompt` does."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        found: list[PromptInput] = [prompts]  # type: ignore[list-item]
    elif not isinstance(prompts, Iterable):
        raise ValueError(f"not a prompt: {prompts!r:.80}; {_KINDS}")
    else:
        found = list(prompts)  # type: ignore[arg-type]
    for prompt in found:
        read_prompt(prompt)
    return found


def read_prompts(prompts: PromptInput | Sequence[PromptInput]) -> list[str | list[int]]:
    """Each prompt, of text alone, as its text or its token ids. Raises ValueError where one is neither,
    InvalidRequestError where it has what can't be served."""
    given = each_prompt(prompts)
    if any(isinstance(prompt, Mapping) and prompt.get("multi_modal_data") for prompt in given):
        raise InvalidRequestError("multi_modal_data: text alone is taken here", param="multi_modal_data")
    return [read_prompt(prompt) for prompt in given]


def read_media(prompt: PromptInput) -> dict[str, Any]:
    """The field of a body that holds a prompt's images and sounds. Raises ValueError for what is neither."""
    data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
    return {"multi_modal_data": as_urls(data)} if data else {}


def read_prompt(prompt: PromptInput) -> str | list[int]:
    """A prompt's text or token ids. Raises ValueError for what has neither, InvalidRequestError for fields that only
    other engines know."""
    if isinstance(prompt, Mapping):
        refuse(prompt)
        unknown = {name for name in prompt if prompt[name] is not None} - _FIELDS
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
