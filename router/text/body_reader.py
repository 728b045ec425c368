"""Bodies as structures, forgiving where that is safe: a field that no structure has is refused when it would change the
answer, and else left out, which the log says once."""

from __future__ import annotations

import difflib
import logging
from functools import cache
from typing import Any, NoReturn, get_args

import msgspec

from tandem.engine.contracts.errors import InvalidRequestError
from tandem.router.text.openai_api import Body, UnknownFieldError, decode, parse_body

logger = logging.getLogger(__name__)

MAX_NAMED = 1000  # fields that the log has named, since clients make up names; a guess
LIKELY_A_SLIP = 0.8  # of 1, a guess: temprature is one, user_id is none for `user`

ONE_OF_ITS_FIELDS = "say it by `structured_outputs`"
NO_SAMPLER = "this way to sample isn't built; leave it out"
AS_THE_MODEL_SAYS = (
    "scores are the logistic function of the logit, and vectors as long as the model's modules.json says; leave it out"
)
NOT_STORED = "nothing is stored here; send the items of earlier responses as `input`"
CALLED_MAX_TOKENS = "it is called `max_tokens`"
SWITCHES = ("normalize", "use_activation", "activation", "softmax")  # false would change the answer as well as true
# What would change the answer and isn't built, in the words of OpenAI's, vLLM's and others' clients: field -> why, and
# what to do. A structure that has the field takes it, whatever stands here.
REFUSED = {
    "messages": "conversations go to /v1/chat/completions",
    "prompt": "a prompt goes to /v1/completions",
    "input": "it is called `prompt` or `messages`",
    "extra_body": "it is a word of the client's library: put its fields beside the others",
    "max_new_tokens": CALLED_MAX_TOKENS,
    "max_output_tokens": CALLED_MAX_TOKENS,
    "max_tokens": "it is called `max_output_tokens`",
    "max_completion_tokens": "it is called `max_output_tokens`",
    "max_tokens_to_sample": CALLED_MAX_TOKENS,
    "n_predict": CALLED_MAX_TOKENS,
    "num_predict": CALLED_MAX_TOKENS,
    "stop_sequences": "it is called `stop`",
    "repeat_penalty": "it is called `repetition_penalty`",
    "system": "it is one of `messages`",
    "best_of": "ask for `n` and choose",
    "truncate_prompt_tokens": "what is embedded, scored or counted is taken whole; cut it yourself",
    "max_tokens_per_doc": "documents are taken whole; cut them yourself",
    "echo": "answers don't repeat the conversation; leave it out",
    "tools": "tools are called in conversations: use /v1/chat/completions",
    "tool_choice": "tools are called in conversations: use /v1/chat/completions",
    "functions": "it has been replaced by `tools`",
    "function_call": "it has been replaced by `tool_choice`",
    "audio": "this server makes text alone; leave it out",
    "web_search_options": "this server searches nothing; leave it out, or offer a search as one of `tools`",
    "previous_response_id": NOT_STORED,
    "conversation": NOT_STORED,
    "background": "an answer ends with its connection; leave it out",
    "context_management": "nothing is compacted here; send what the model is to read",
    "moderation": "this server moderates nothing; leave it out",
    "chat_template": "templates are the operator's: start the router with --chat-template",
    "structural_tag": ONE_OF_ITS_FIELDS,
    "json_schema": ONE_OF_ITS_FIELDS,
    "regex": ONE_OF_ITS_FIELDS,
    "ebnf": ONE_OF_ITS_FIELDS,
    "guided_decoding_backend": "there is one; leave it out",
    "logits_processors": "no code is taken from requests",
    "custom_logit_processor": "no code is taken from requests",
    "num_beams": "it is called `beam_width`, beside `use_beam_search`: true",
    "logprob_token_ids": "ask for `logprobs`, the best 20 tokens of a place",
    "thinking_token_budget": "reasoning isn't cut; bound the whole answer by `max_tokens`",
    "repetition_detection": "an answer that repeats itself isn't ended; use `repetition_penalty` or `max_tokens`",
    "watermarking": "nothing is watermarked here; leave it out",
    "return_token_offsets": "ask for `logprobs` of completions: their `text_offset` says where tokens begin",
    "typical_p": NO_SAMPLER,
    "top_a": NO_SAMPLER,
    "mirostat": NO_SAMPLER,
    "dry_multiplier": NO_SAMPLER,
    "xtc_probability": NO_SAMPLER,
    "lora_path": "load it by /v1/load_lora_adapter, and name it as `model`",
    "prompt_embeds": "prompts are text or token ids; leave it out",
    "kv_transfer_params": "hand-offs are the servers' own business; leave it out",
    **dict.fromkeys(SWITCHES, AS_THE_MODEL_SAYS),
}
SAYS_NOTHING = (b"null", b"false", b'""', b"[]")  # by which clients say that they don't use a field


class BodyReader:
    """Decodes bodies, and names each unknown field in the log once. One per process, on one thread."""

    def __init__(self, is_strict: bool = False) -> None:
        self._is_strict = is_strict
        self._named: set[str] = set()

    def read(self, kind: type[Body], raw: bytes) -> Body:
        """The body as a structure. Raises InvalidRequestError; `param` names the field."""
        try:
            return parse_body(kind, raw)
        except UnknownFieldError:  # a second look is for bodies that have one
            return parse_body(kind, self._without_unknown(kind, raw))

    def known_fields(self, kind: type[msgspec.Struct], given: dict[str, str]) -> dict[str, str]:
        """The fields of a form that the structure has. Raises InvalidRequestError, as `read` does for others."""
        known = _known_fields(kind)
        for name in given.keys() - known.keys():
            raw = given[name].encode()
            self._leave_out(
                name, msgspec.Raw(raw if raw in SAYS_NOTHING else msgspec.json.encode(given[name])), "", known
            )
        return {name: value for name, value in given.items() if name in known}

    def _without_unknown(self, kind: type[msgspec.Struct], raw: bytes, within: str = "") -> bytes:
        given = decode(dict[str, msgspec.Raw], raw)
        known = _known_fields(kind)
        for name in [name for name in given if name not in known]:
            self._leave_out(name, given.pop(name), within, known)
        for name, inner in known.items():
            if inner is not None and bytes(given.get(name, msgspec.Raw(b""))).lstrip().startswith(b"{"):
                given[name] = msgspec.Raw(self._without_unknown(inner, bytes(given[name]), within or name))
        return msgspec.json.encode(given)

    def _leave_out(self, name: str, value: msgspec.Raw, within: str, known: dict[str, Any]) -> None:
        why, said = None if within else REFUSED.get(name), decode(Any, bytes(value))
        if why is not None:
            if said is not None and (name in SWITCHES or msgspec.json.encode(said) not in SAYS_NOTHING):
                _bad(name, f"{name} is not supported: {why}")
            return
        if close := difflib.get_close_matches(name, known, n=1, cutoff=LIKELY_A_SLIP):
            _bad(within or name, f"unknown field {name!r}; did you mean {close[0]}?")
        if self._is_strict:
            _bad(within or name, f"unknown field {name[:64]!r}; leave it out (--strict-requests)")
        if name not in self._named and len(self._named) < MAX_NAMED:
            self._named.add(name)
            logger.warning("clients send the field %r, which is unknown and left out (--strict-requests)", name[:64])


@cache
def _known_fields(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    """The fields of a structure, each with the structure that it holds, if it holds one."""
    return {field.encode_name: _structure_in(field.type) for field in msgspec.structs.fields(kind)}


def _structure_in(hint: Any) -> type[msgspec.Struct] | None:
    parts = [hint, *get_args(hint)]
    return next((part for part in parts if isinstance(part, type) and issubclass(part, msgspec.Struct)), None)


def _bad(param: str, message: str) -> NoReturn:
    raise InvalidRequestError(message, param=param)
