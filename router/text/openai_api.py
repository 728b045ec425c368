"""The bodies that clients send: schema, strict validation, and errors that name the field.

Beyond OpenAI's API: top_k, min_p, repetition_penalty, stop_token_ids, ignore_eos, min_tokens, return_token_ids,
priority, prompt_logprobs, use_prefix_cache, cache_salt, add_special_tokens, skip_special_tokens,
include_stop_str_in_output, truncate_prompt_tokens, truncation_side, return_tokens_as_token_ids, request_id, timeout,
structured_outputs, guided_…, allowed_token_ids, bad_words, use_beam_search, beam_width, length_penalty,
early_stopping, multi_modal_data.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Hashable
from functools import cache
from typing import Annotated, Any, Literal, NoReturn, TypeVar, cast

import msgspec
from msgspec import Meta

from tandem.engine.contracts.errors import InvalidRequestError, TandemError
from tandem.engine.contracts.wire.parts import TargetMs

MAX_SAMPLES = 128  # a guess, as are the others: above what clients ask for, and bounded for nodes
MAX_PROMPTS = 2048
MAX_STOPS = 16
MAX_LOGPROBS = 20
LEAST_TIMEOUT_S = 0.1  # seconds between two looks at deadlines
MAX_BIASES = 4096
MAX_CHOICES = 4096
MAX_ALLOWED = 1 << 17
MAX_BAD_WORDS = 256
MAX_LENGTH_PENALTY = 5  # to which power float32 still holds the longest outputs

TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)]
Url = Annotated[str, Meta(min_length=1)]
Side = Literal["left", "right"]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
NumLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field `stream_options` of a body."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # with every event the usage so far
    include_obfuscation: bool | None = None  # changes nothing: events aren't padded


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the output must be. Exactly one of the first six fields is given."""

    json: Any = None  # a JSON schema
    json_object: bool | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None  # Lark or GBNF
    structural_tag: Any = None  # xgrammar's, as an object or as its JSON
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None  # changes nothing: there is none
    whitespace_pattern: str | None = None


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every body that makes tokens may say; `null` means the default everywhere."""

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    stop: Annotated[str, Meta(max_length=1024)] | Stops | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=MAX_BIASES)] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    # extensions
    top_k: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=64)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    prompt_logprobs: NumLogprobs | None = None
    use_prefix_cache: bool | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    add_special_tokens: bool | None = None  # those that the tokenizer itself puts before or after a prompt
    skip_special_tokens: bool | None = None  # false: they are part of the text
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, lt=1 << 31)] | None = None  # how many stay; -1: as many as fit
    truncation_side: Side | None = None  # where those that don't stay are left out; left
    # "token_id:7" in place of log-probabilities' texts, or "token_id:7:text"
    return_tokens_as_token_ids: bool | Literal["with_text"] | None = None
    request_id: Annotated[str, Meta(pattern="^[!-~]{1,256}$")] | None = None  # part of the answer's id
    timeout: Annotated[float, Meta(ge=LEAST_TIMEOUT_S)] | None = None  # seconds, if that is less than --request-s
    # What is promised to the request, in milliseconds, in place of what the cluster promises to all.
    ttft_target_ms: TargetMs | None = None
    tpot_target_ms: TargetMs | None = None
    itl_max_ms: TargetMs | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None  # this and the next: older names of the same
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    use_beam_search: bool | None = None  # this and the next three: docs/beams.md
    beam_width: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    length_penalty: Annotated[float, Meta(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: bool | Literal["never"] | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/completions as it is on the wire."""

    prompt: msgspec.Raw
    max_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None  # takes precedence over max_tokens
    best_of: Annotated[int, Meta(ge=1, le=MAX_SAMPLES)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    suffix: str | None = None
    multi_modal_data: dict[Literal["image", "audio"], Url | list[Url]] | None = None  # of the prompt's placeholders

    @property
    def num_samples(self) -> int:
        return self.n or 1

    @property
    def num_generated(self) -> int:
        """Samples to generate, of which the best `num_samples` are returned. Beams are no samples."""
        return self.num_samples if self.use_beam_search else self.best_of or self.num_samples

    @property
    def num_beams(self) -> int:
        """How many beams are searched over; 0: none."""
        return self.beam_width or self.best_of or self.num_samples if self.use_beam_search else 0

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else (self.stop or [])


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None


class UnknownFieldError(InvalidRequestError):
    """A body has a field that its structure lacks."""


Body = TypeVar("Body", bound=msgspec.Struct)
T = TypeVar("T")
Prompts = list[str] | list[list[int]]

_decoder = cache(msgspec.json.Decoder)
_decode_text = msgspec.json.Decoder(str).decode
_decode_texts = msgspec.json.Decoder(list[str]).decode
_decode_ids = msgspec.json.Decoder(list[TokenId]).decode
_decode_id_lists = msgspec.json.Decoder(list[list[TokenId]]).decode


def parse_body(kind: type[Body], body: bytes) -> Body:
    """The body as a structure. Raises InvalidRequestError; `param` names the field when the fault lies in one."""
    parsed = decode(kind, body)
    if isinstance(parsed, CompletionBody):
        if parsed.max_completion_tokens is not None:
            msgspec.structs.force_setattr(parsed, "max_tokens", parsed.max_completion_tokens)
        check_combinations(parsed)
    return parsed


def decode(kind: type[T], body: bytes) -> T:
    """Decodes any type from JSON. Raises what `parse_body` raises."""
    try:
        return cast(T, _decoder(cast(Hashable, kind)).decode(body))
    except msgspec.ValidationError as error:
        what = UnknownFieldError if "contains unknown field" in str(error) else InvalidRequestError
        raise what(_readable(str(error)), param=_field_of(str(error))) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON in UTF-8: {error}") from None


def parse_prompts(raw: msgspec.Raw) -> Prompts:
    """A string, strings, token ids, or lists of token ids, always as a list of prompts; none of them is empty."""
    data = bytes(raw).strip()
    inner = data[1:].lstrip()[:1]
    prompts: Prompts
    try:
        if data[:1] == b'"':
            prompts = [_decode_text(data)]
        elif inner == b'"':
            prompts = _decode_texts(data)
        elif inner == b"[":
            prompts = _decode_id_lists(data)
        else:
            prompts = [_decode_ids(data)]
    except msgspec.ValidationError as error:
        place = re.search(r"`\$(\S+)`", str(error))
        _bad("prompt", f"{str(error).split(' - at')[0]}{f' at prompt{place[1]}' if place else ''}; {_PROMPT_KINDS}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _bad("prompt", f"prompt is not valid JSON in UTF-8: {error}")
    if not prompts or not all(prompts):
        _bad("prompt", f"prompt must not be empty; {_PROMPT_KINDS}")
    if len(prompts) > MAX_PROMPTS:
        _bad("prompt", f"at most {MAX_PROMPTS} prompts in one request, not {len(prompts)}")
    return prompts


_PROMPT_KINDS = "prompt is a string, a list of strings, a list of token ids, or a list of lists of token ids"


def check_combinations(body: CompletionBody) -> None:
    """Raises InvalidRequestError for fields that are right each by itself, but not together."""
    if body.suffix:
        _bad("suffix", "suffix is not supported: the served models only continue text")
    if body.stop == "":
        _bad("stop", "a stop string must not be empty")
    if body.truncate_prompt_tokens == 0:
        _bad("truncate_prompt_tokens", "truncate_prompt_tokens must be at least 1, or -1 for as many as fit")
    if body.max_tokens == 0 and not body.echo:
        _bad("max_tokens", "max_tokens must be at least 1 (0 is only allowed together with echo)")
    if body.stream_options is not None and not body.stream:
        _bad("stream_options", "stream_options is only allowed when stream is true")
    check_beams(body)
    if body.best_of is not None and body.best_of < body.num_samples:
        _bad("best_of", f"best_of ({body.best_of}) must be at least n ({body.num_samples})")
    if body.stream and body.num_generated > body.num_samples:
        _bad("best_of", "best_of greater than n can't be streamed: the best are known only at the end")
    if body.stream and body.prompt_logprobs is not None:
        _bad("prompt_logprobs", "prompt_logprobs can't be streamed; use echo with logprobs")
    if body.max_tokens is not None and (body.min_tokens or 0) > body.max_tokens:
        _bad("min_tokens", f"min_tokens ({body.min_tokens}) is greater than max_tokens ({body.max_tokens})")


def check_beams(body: CompletionBody) -> None:
    """Raises InvalidRequestError for fields of beam search without it, and for those that it has no use for."""
    if not body.use_beam_search:
        said = {"beam_width": body.beam_width, "length_penalty": body.length_penalty != 1.0 and body.length_penalty}
        for name, value in {**said, "early_stopping": body.early_stopping}.items():
            if value is not None and value is not False:
                _bad(name, f"{name} is for beam search: send use_beam_search: true as well")
        return
    if body.num_beams < body.num_samples:
        _bad("beam_width", f"beam_width ({body.num_beams}) must be at least n ({body.num_samples})")
    if body.temperature:
        _bad("temperature", "beam search draws nothing: leave temperature out, or send 0")
    if body.presence_penalty or body.frequency_penalty or body.repetition_penalty not in (None, 1.0):
        _bad("repetition_penalty", "beam search takes no penalties but length_penalty: leave the others out")


def parse_logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Sorted (token id, bias); raises InvalidRequestError for keys that are no token ids of the model."""
    pairs = []
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            _bad("logit_bias", f"logit_bias has the key {key[:32]!r}; keys are token ids from 0 to {vocab_size - 1}")
        pairs.append((int(key), value))
    return tuple(sorted(pairs))


def parse_seed(seed: int | None) -> int:
    """A u64; drawn here when the client gave none, so that another attempt continues the same random sequence."""
    return secrets.randbits(64) if seed is None else seed & ((1 << 64) - 1)


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)


def _field_of(message: str) -> str | None:
    """The top-level field in msgspec's "… - at `$.field[…]`" or "… field `name`"."""
    found = re.search(r"\$\.([A-Za-z_]\w*)", message) or re.search(r"field `([^`]*)`", message)
    return found[1] if found else None


def _readable(message: str) -> str:
    return re.sub(r" - at (?:`key` in )?`\$\.([^`]*)`", r" (field `\1`)", message)


# --- errors ---------------------------------------------------------------------------------------------------


def error_body(error: TandemError) -> bytes:
    """OpenAI's error object."""
    return msgspec.json.encode(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )
