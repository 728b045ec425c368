"""What `--speculative-config` says, in vLLM's words (docs/speculation.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.engine.contracts.errors import ConfigError

MOST_DRAFTS = 16  # tokens guessed ahead of one sequence; a guess: more are hardly ever right together
MOST_LOOKUP = 32  # tokens that are looked for; a guess
DEFAULT_LOOKUP = 5  # vLLM's
OTHER_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "deepseek_mtp", "medusa", "mlp_speculator", "suffix")
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


class PromptLookup(msgspec.Struct, frozen=True):
    """Guesses by what followed the newest `prompt_lookup_min` to `prompt_lookup_max` tokens where they stood before."""

    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


def read_speculative_config(text: str) -> PromptLookup | None:
    """Reads a JSON object; None for "". Raises ConfigError, with what it should be instead."""
    if not text:
        return None
    try:
        given = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--speculative-config is no JSON object ({error}), for example {_EXAMPLE}") from None
    method = given.pop("method", "ngram" if "model" not in given else "draft_model")
    if method != "ngram":
        known = "is not built" if method in OTHER_METHODS else "is not known"
        raise ConfigError(f"--speculative-config: method {method!r} {known}; there is ngram, for example {_EXAMPLE}")
    numbers = {name: given.pop(name) for name in PromptLookup.__struct_fields__ if name in given}
    if given:
        raise ConfigError(f"--speculative-config: {', '.join(sorted(given))} is nothing that ngram takes: {_EXAMPLE}")
    if "num_speculative_tokens" not in numbers:
        raise ConfigError(f"--speculative-config lacks num_speculative_tokens, for example {_EXAMPLE}")
    most = numbers.setdefault("prompt_lookup_max", numbers.get("prompt_lookup_min", DEFAULT_LOOKUP))
    numbers.setdefault("prompt_lookup_min", most)
    for name, bound in (("num_speculative_tokens", MOST_DRAFTS), ("prompt_lookup_max", MOST_LOOKUP)):
        _check(name, numbers[name], bound)
    _check("prompt_lookup_min", numbers["prompt_lookup_min"], numbers["prompt_lookup_max"])
    return PromptLookup(**numbers)


def _check(name: str, value: object, bound: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= bound:
        raise ConfigError(f"--speculative-config: {name} is {value!r}: it must be a whole number from 1 to {bound}")
