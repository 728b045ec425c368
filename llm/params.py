"""The settings that a client may give with one call, under the names of the HTTP API."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output: one of the first six fields. The server refuses one that it can't follow, and says
    why."""

    json: str | Mapping[str, Any] | type | None = None  # a JSON schema, or a pydantic model
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark or GBNF
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None

    def as_body(self) -> dict[str, Any]:
        """The fields that are set. Raises ValueError if `json` is a class without a schema."""
        body = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.json, type):
            make_schema = getattr(self.json, "model_json_schema", None)
            if make_schema is None:
                raise ValueError(f"json={self.json.__name__} has no schema: give a JSON schema or a pydantic model")
            body["json"] = make_schema()
        if self.choice is not None:
            body["choice"] = list(self.choice)
        return body


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of a request. None leaves a setting to the server: its model's defaults, a drawn seed.

    The server checks ranges: a wrong one is an InvalidRequestError that names the field.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool | None = None
    logprobs: int | None = None  # of each token, and of so many others that were likely at its place
    prompt_logprobs: int | None = None
    priority: int | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    itl_max_ms: float | None = None
    use_prefix_cache: bool | None = None
    cache_salt: str | None = None
    structured_outputs: StructuredOutputsParams | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None  # n unless it is set
    length_penalty: float | None = None
    early_stopping: bool | str | None = None  # or "never"

    def as_body(self) -> dict[str, Any]:
        """The fields of a completion's body that are set."""
        body = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if self.logit_bias is not None:
            body["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if self.structured_outputs is not None:
            body["structured_outputs"] = self.structured_outputs.as_body()
        if self.logprobs is not None:
            body["return_tokens_as_token_ids"] = "with_text"
        return {
            name: value if isinstance(value, str | Mapping) or not isinstance(value, Sequence) else list(value)
            for name, value in body.items()
            if value is not None
        }

    def as_chat_body(self) -> dict[str, Any]:
        """The same for a conversation, whose API asks for log-probabilities by two fields."""
        body = self.as_body()
        if (number := body.pop("logprobs", None)) is not None:
            body |= {"logprobs": True, "top_logprobs": number}
        return body


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Settings of `LLM.beam_search`, which returns all `beam_width` outputs."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0: a search draws nothing
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | str = False

    def as_sampling(self) -> SamplingParams:
        """The same as settings of a completion. Raises ValueError for a temperature above 0."""
        if self.temperature:
            raise ValueError("beam search draws nothing: leave temperature at 0")
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )
