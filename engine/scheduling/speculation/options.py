"""What `--speculative-config` says, in vLLM's words (docs/speculation.md)."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.engine.contracts.config import MOST_DRAFTS
from tandem.engine.contracts.errors import ConfigError

MOST_LOOKUP = 32  # tokens that are looked for; a guess
DEFAULT_LOOKUP = 5  # vLLM's
OTHER_METHODS = ("eagle", "medusa", "mlp_speculator", "suffix")
# What vLLM called mtp by the model's family.
FORMER_NAMES = {"deepseek_mtp": "mtp", "mimo_mtp": "mtp", "glm4_moe_mtp": "mtp"}
_EXAMPLES = {
    "ngram": '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
    "draft_model": '{"method": "draft_model", "model": "FOLDER_OR_NAME", "num_speculative_tokens": 4}',
    "eagle3": '{"method": "eagle3", "model": "FOLDER_OR_NAME", "num_speculative_tokens": 3}',
    "mtp": '{"method": "mtp", "num_speculative_tokens": 1}',
}


class PromptLookup(msgspec.Struct, frozen=True):
    """Guesses by what followed the newest `prompt_lookup_min` to `prompt_lookup_max` tokens where they stood before."""

    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


class DraftModelOptions(msgspec.Struct, frozen=True):
    """Guesses by a smaller model of the same vocabulary: a folder or a hub name, and its revision there."""

    num_speculative_tokens: int
    model: str
    revision: str = ""


class EagleOptions(msgspec.Struct, frozen=True):
    """Guesses by an EAGLE-3 head made for the served model: a folder or a hub name, and its revision there."""

    num_speculative_tokens: int
    model: str
    revision: str = ""


class MtpOptions(msgspec.Struct, frozen=True):
    """Guesses by the layer behind the served model's last, which is in its own checkpoint (multi-token prediction)."""

    num_speculative_tokens: int


_KINDS = {"ngram": PromptLookup, "draft_model": DraftModelOptions, "eagle3": EagleOptions, "mtp": MtpOptions}


def read_speculative_config(text: str) -> PromptLookup | DraftModelOptions | EagleOptions | MtpOptions | None:
    """Reads a JSON object; None for "". Raises ConfigError, with what it should be instead."""
    if not text:
        return None
    try:
        given = msgspec.json.decode(text.encode(), type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--speculative-config is no JSON object ({error}), for example {_EXAMPLES['ngram']}"
        ) from None
    method = given.pop("method", "ngram" if "model" not in given else "draft_model")
    if isinstance(method, str):
        method = FORMER_NAMES.get(method, method)
    if method not in _EXAMPLES:
        known = "is not built" if method in OTHER_METHODS else "is not known"
        there = f"there are {' and '.join(_EXAMPLES)}, for example {_EXAMPLES['ngram']}"
        raise ConfigError(f"--speculative-config: method {method!r} {known}; {there}")
    kind = _KINDS[method]
    fields = {name: given.pop(name) for name in kind.__struct_fields__ if name in given}
    if given:
        raise ConfigError(
            f"--speculative-config: {', '.join(sorted(given))} is nothing that {method} takes: {_EXAMPLES[method]}"
        )
    if "num_speculative_tokens" not in fields:
        raise ConfigError(f"--speculative-config lacks num_speculative_tokens, for example {_EXAMPLES[method]}")
    _check("num_speculative_tokens", fields["num_speculative_tokens"], MOST_DRAFTS)
    if method == "ngram":
        return _lookup(fields)
    if method == "mtp":
        return MtpOptions(**fields)
    _check_model(fields, method)
    return DraftModelOptions(**fields) if method == "draft_model" else EagleOptions(**fields)


def _lookup(fields: dict[str, Any]) -> PromptLookup:
    most = fields.setdefault("prompt_lookup_max", fields.get("prompt_lookup_min", DEFAULT_LOOKUP))
    fields.setdefault("prompt_lookup_min", most)
    _check("prompt_lookup_max", most, MOST_LOOKUP)
    _check("prompt_lookup_min", fields["prompt_lookup_min"], most)
    return PromptLookup(**fields)


def _check_model(fields: dict[str, Any], method: str) -> None:
    for name in ("model", "revision"):
        if not isinstance(fields.get(name, ""), str):
            raise ConfigError(f"--speculative-config: {name} is {fields[name]!r}: it must be a string")
    if not fields.get("model"):
        raise ConfigError(f"--speculative-config lacks model, for example {_EXAMPLES[method]}")


def _check(name: str, value: object, bound: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= bound:
        raise ConfigError(f"--speculative-config: {name} is {value!r}: it must be a whole number from 1 to {bound}")
