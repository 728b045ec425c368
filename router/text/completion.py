"""From a validated body to what each prompt asks of the nodes: token ids, sampling parameters, limits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from tandem.engine.contracts.errors import InvalidRequestError, ModelNotFoundError
from tandem.engine.contracts.generation_config import SamplingDefaults
from tandem.engine.contracts.hashing import EVERYBODYS, Secrecy
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.encoder import sequence_of
from tandem.engine.contracts.wire.media import MediaItem
from tandem.engine.contracts.wire.parts import AdapterRef, EncoderFacts, Task
from tandem.router.text.encoder_prompts import check_is_text, text_input, with_bans
from tandem.router.text.openai_api import CompletionBody, GenerationBody, Prompts, Side, parse_logit_bias, parse_seed
from tandem.router.text.tokenizer import Tokenizer

T = TypeVar("T")
TokenSequences = tuple[tuple[int, ...], ...]

DEFAULT_MAX_TOKENS = 16  # OpenAI's own
MAX_SEQUENCES = 4096  # a guess: of one body, prompts times samples
CHARS_PER_TOKEN = 32  # far above what text in any language has on average; a guess


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the router knows about the served model; the lengths come from the nodes."""

    name: str
    max_model_len: int
    vocab_size: int
    task: Task = "generate"
    encoder: EncoderFacts | None = None
    media_kinds: tuple[str, ...] = ()  # what it takes beside text
    embedding_sizes: tuple[int, ...] = ()  # as in NodeInfo
    aliases: tuple[str, ...] = ()  # what else clients may call it

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)

    @property
    def max_input_len(self) -> int:
        """Tokens of prompt and output together; of a model that pools, of its input alone."""
        return self.max_model_len - (self.task != "generate")


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt of a request, ready to be sent."""

    token_ids: npt.NDArray[np.int32]
    text: str | None  # None: the client sent token ids
    sampling: SamplingParams
    secrecy: Secrecy = EVERYBODYS  # who may find its blocks in a cache
    adapter: AdapterRef | None = None
    cache_share: float = 1.0  # share of each cache that its tenant may fill
    is_chat: bool = False
    pair_start: int = 0  # for models that score: where a pair's second text begins
    shown_ids: frozenset[int] = frozenset()  # special tokens that are part of the output's text
    media: tuple[MediaItem, ...] = ()  # of the spans of `token_ids` that are below 0

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's tokens as the client knows them."""
        if not self.media or self.media[0].kind != "encoder":
            return with_placeholders(self.token_ids.tolist(), self.media)
        text = self.media[0].arrays().get("input_ids")
        return (self.token_ids if text is None else text[0]).tolist()  # type: ignore[no-any-return]

    @property
    def num_prompt_tokens(self) -> int:
        """How many tokens the client is told that its prompt has: of an encoder's input its own, not those that fill
        its blocks up."""
        if not self.media or self.media[0].kind != "encoder":
            return len(self.token_ids)
        [item] = self.media
        own = next((tensor.shape[-1] for tensor in item.tensors if tensor.name == "input_ids"), item.length)
        return own + len(self.token_ids) - item.length


def with_placeholders(token_ids: list[int], media: Sequence[MediaItem]) -> list[int]:
    """A prompt's ids as the model knows them: placeholders in the spans of its items."""
    for item in media:
        token_ids[item.start : item.end] = item.arrays()["input_ids"][0].tolist()
    return token_ids


def check_model(name: str | None, facts: ModelFacts) -> None:
    if name is not None and name not in facts.names:
        raise ModelNotFoundError(
            f"the model {name[:200]!r} does not exist; this server has {facts.name!r} (/v1/models lists all)",
            param="model",
        )


_DOES = {"generate": "generates text", "embed": "makes embeddings of texts", "score": "scores pairs of texts"}
_PATHS = {
    "generate": "/v1/completions, /v1/chat/completions or /v1/responses",
    "embed": "/v1/embeddings",
    "score": "/score or /rerank",
}


def check_task(facts: ModelFacts, wanted: Task) -> None:
    """Raises InvalidRequestError when the served model is of another kind."""
    if facts.task != wanted:
        raise InvalidRequestError(
            f"{facts.name} {_DOES[facts.task]}: ask {_PATHS[facts.task]}, or a server of a model that {_DOES[wanted]}",
            param="model",
        )


def tokenize_prompts(
    prompts: Prompts,
    tokenizer: Tokenizer,
    facts: ModelFacts,
    add_special_tokens: bool = True,
    cut: Side | None = None,
) -> list[list[int]]:
    """The token ids of each prompt, as `tokenize_text` makes them."""
    return [
        tokenize_text(prompt, tokenizer, facts, add_special_tokens, cut) if isinstance(prompt, str) else prompt
        for prompt in prompts
    ]


def tokenize_text(
    text: str, tokenizer: Tokenizer, facts: ModelFacts, add_special_tokens: bool, cut: Side | None = None
) -> list[int]:
    """The token ids of a text; of one that is far too long and will be cut at a side, those of its other side alone.
    Raises InvalidRequestError when nothing will be cut and the text's beginning alone is far too long."""
    limit = CHARS_PER_TOKEN * facts.max_model_len
    if len(text) > limit:
        token_ids = tokenizer.encode(text[-limit:] if cut == "left" else text[:limit], add_special_tokens)
        # Twice the length: cutting a text may change the tokens beside the cut, but never so many.
        if len(token_ids) > 2 * facts.max_model_len:
            if cut is not None:
                return token_ids
            most, output = facts.max_input_len, " in all, output included" if facts.task == "generate" else ""
            problem = f"the prompt has more than {2 * facts.max_model_len} tokens; the model takes {most}{output}"
            raise InvalidRequestError(problem, param="prompt")
    return tokenizer.encode(text, add_special_tokens)


def cut_side(body: GenerationBody) -> Side | None:
    """The side at which `truncate_prompt_tokens` cuts long prompts; None: it cuts none."""
    return None if body.truncate_prompt_tokens is None else body.truncation_side or "left"


def check_text(text: str, facts: ModelFacts) -> None:
    """Refuses more text than /tokenize takes at once, since a text takes a hundred times its size in memory as tokens.
    Raises InvalidRequestError."""
    limit = CHARS_PER_TOKEN * facts.max_model_len
    if len(text) > limit:
        raise InvalidRequestError(
            f"the text has {len(text)} characters; at most {limit} are tokenized in one request", param="prompt"
        )


def held_to(plans: list[PromptPlan], grammar: str) -> list[PromptPlan]:
    """The same plans, whose output must follow a grammar."""
    return [replace(plan, sampling=msgspec.structs.replace(plan.sampling, grammar=grammar)) for plan in plans]


def banned_ids(words: Sequence[str], tokenizer: Tokenizer) -> TokenSequences:
    """The token ids of each word, as it is written at the beginning of a text and behind a space."""
    texts = {text for word in words for text in (word.lstrip() or word, f" {word.lstrip()}")}
    return tuple(sorted({tuple(ids) for text in texts if (ids := tokenizer.encode(text, add_special_tokens=False))}))


def with_adapter(plan: PromptPlan, adapter: AdapterRef) -> PromptPlan:
    """The same plan for the model with an adapter, whose KV is another's."""
    digest = hashlib.sha256(plan.secrecy.context + b"adapter" + adapter.digest).digest()
    return replace(plan, adapter=adapter, secrecy=replace(plan.secrecy, context=digest))


def echo_text(plan: PromptPlan, tokenizer: Tokenizer) -> str:
    if plan.text is not None:
        return plan.text
    return tokenizer.decode(plan.prompt_ids, skip_special_tokens=not plan.shown_ids)


def truncated(token_ids: list[int], body: CompletionBody, tokenizer: Tokenizer, facts: ModelFacts) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt: its beginning where `truncation_side` is right; else its end,
    and before that the special tokens with which the tokenizer begins every text."""
    most = body.truncate_prompt_tokens
    if most == -1:
        most = facts.max_model_len - max(1, DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    if most is None or len(token_ids) <= most:
        return token_ids
    if body.truncation_side == "right":
        return token_ids[: max(0, most)]
    added = tokenizer.encode("")
    num_kept = next((i for i, (a, b) in enumerate(zip(added, token_ids, strict=False)) if a != b), len(added))
    num_kept = min(num_kept, max(0, most))
    return token_ids[:num_kept] + token_ids[len(token_ids) - (most - num_kept) :]


def plan_prompts(
    body: CompletionBody,
    prompts: Prompts,
    prompt_ids: list[list[int]],
    facts: ModelFacts,
    defaults: SamplingDefaults,
    default_max_tokens: int = DEFAULT_MAX_TOKENS,
    banned: TokenSequences = (),
) -> list[PromptPlan]:
    """One plan for each prompt; what the body leaves open is as in `defaults`, and then `default_max_tokens` as far as
    there is room. `banned`: sequences of token ids that no output may contain.

    Raises InvalidRequestError when ids or lengths are beyond the model, naming prompt, max_tokens or the list.
    """
    num_each = body.num_beams or body.num_generated
    if len(prompts) * num_each > MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with {num_each} samples each are more than {MAX_SEQUENCES} sequences",
            param="beam_width" if body.beam_width else "best_of" if body.best_of else "n",
        )
    _check_token_ids(body.stop_token_ids or [], facts.vocab_size, "stop_token_ids")
    _check_token_ids(body.allowed_token_ids or [], facts.vocab_size, "allowed_token_ids")
    logit_bias = parse_logit_bias(body.logit_bias, facts.vocab_size)
    if facts.encoder is not None:
        check_is_text(body, facts.encoder)
    plans = []
    for prompt, ids in zip(prompts, prompt_ids, strict=True):
        if facts.encoder is None:
            _check_length(len(ids), facts)
        token_ids = np.array(ids, dtype=np.int32)
        if ids and int(token_ids.max()) >= facts.vocab_size:
            _check_token_ids(ids, facts.vocab_size, "prompt")
        most = defaults.max_new_tokens or default_max_tokens
        text = prompt if isinstance(prompt, str) else None
        if facts.encoder is not None:
            item = text_input(ids, facts.encoder)
            plans.append(encoder_plan(item, facts.encoder.prompt, text, body, facts, defaults, most, banned))
            continue
        most = _max_tokens(body, len(ids), facts.max_model_len, most)
        sampling = _sampling(body, logit_bias, most, defaults, banned)
        plans.append(PromptPlan(token_ids, text, sampling))
    return plans


def encoder_plan(
    item: MediaItem,
    decoder_ids: Sequence[int],
    text: str | None,
    body: CompletionBody,
    facts: ModelFacts,
    defaults: SamplingDefaults,
    default_max_tokens: int,
    banned: tuple[tuple[int, ...], ...] = (),
) -> PromptPlan:
    """The plan of an encoder's input. `decoder_ids`: how the decoder begins. Raises InvalidRequestError when one of the
    two sides is too long."""
    assert facts.encoder is not None
    token_ids = sequence_of(item, np.array(decoder_ids, np.int32))
    longest = min(facts.encoder.max_decoder_len, facts.max_model_len - item.length)
    if len(decoder_ids) >= longest:
        raise InvalidRequestError(
            f"the decoder's prompt has {len(decoder_ids)} tokens beside an input of {item.length} positions; the model "
            f"takes {longest} with the output",
            param="prompt",
        )
    logit_bias = parse_logit_bias(body.logit_bias, facts.vocab_size)
    most = _max_tokens(body, len(decoder_ids), longest, default_max_tokens, "the decoder begins with")
    sampling = with_bans(_sampling(body, logit_bias, most, defaults, banned), facts.encoder)
    return PromptPlan(token_ids, text, sampling, media=(item,))


def _check_length(num_tokens: int, facts: ModelFacts) -> None:
    if not num_tokens:
        raise InvalidRequestError("prompt has no tokens", param="prompt")
    if num_tokens >= facts.max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens; the model takes {facts.max_model_len} in all, output included",
            param="prompt",
        )


def _check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    wrong = next((token_id for token_id in token_ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise InvalidRequestError(
            f"{param} holds the token id {wrong}; ids of this model end at {vocab_size - 1}", param=param
        )


def _max_tokens(
    body: CompletionBody, num_prompt_tokens: int, longest: int, default: int, what: str = "the prompt has"
) -> int:
    """The most tokens to make. `longest`: tokens of prompt and output together. Raises InvalidRequestError when what is
    wanted doesn't fit."""
    room = longest - num_prompt_tokens
    wanted = body.max_tokens
    if wanted is None:
        wanted = min(default, room)
        if (body.min_tokens or 0) > wanted:
            raise InvalidRequestError(
                f"min_tokens ({body.min_tokens}) is greater than max_tokens ({wanted} by default)", param="min_tokens"
            )
    if wanted > room:
        raise InvalidRequestError(
            f"{what} {num_prompt_tokens} tokens and max_tokens is {wanted}; together they may not exceed "
            f"{longest}: at most {room} output tokens fit",
            param="max_tokens",
        )
    return wanted


def _sampling(
    body: CompletionBody,
    logit_bias: tuple[tuple[int, float], ...],
    max_tokens: int,
    defaults: SamplingDefaults,
    banned: TokenSequences,
) -> SamplingParams:
    num_logprobs = body.logprobs
    if num_logprobs is None and body.num_generated > body.num_samples:
        num_logprobs = 0  # the best are chosen by their log-probability
    num_prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        num_prompt_logprobs = max(body.logprobs, num_prompt_logprobs or 0)
    repetition_penalty = _first(body.repetition_penalty, defaults.repetition_penalty, 1.0)
    if body.num_beams and repetition_penalty != 1.0:
        text = f"this model's own repetition_penalty is {repetition_penalty}, and beam search takes none: send 1"
        raise InvalidRequestError(text, param="repetition_penalty")
    return SamplingParams(
        max_tokens=max(1, max_tokens),  # max_tokens = 0 (echo alone): the one token is not shown
        min_tokens=body.min_tokens or 0,
        temperature=0.0 if body.num_beams else _first(body.temperature, defaults.temperature, 1.0),
        top_k=max(0, _first(body.top_k, defaults.top_k, 0)),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        min_p=_first(body.min_p, defaults.min_p, 0.0),
        repetition_penalty=repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=logit_bias,
        seed=parse_seed(body.seed),
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=banned,
        beam_width=body.num_beams,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
    )


def _first(asked: T | None, default: T | None, otherwise: T) -> T:
    if asked is not None:
        return asked
    return otherwise if default is None else default
