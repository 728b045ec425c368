"""What `tandem bench` asks for: random prompts, or those of people's conversations in ShareGPT's format."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tandem.engine.contracts.errors import ConfigError

DEFAULT_OUTPUT_TOKENS = 64  # a guess
CHARACTERS_A_TOKEN = 4  # a guess: of English text
# Common enough to be a token each with the space before them, in most vocabularies.
_WORDS = (
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his",
    "they", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all",
)  # fmt: skip


def make_bodies(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """One body a request, the same for the same seed. Raises ConfigError where the data set can't be read."""
    prompts = _conversations(arguments) if arguments.dataset == "sharegpt" else _random_prompts(arguments)
    return [_body(arguments, model, prompt, num_tokens) for prompt, num_tokens in prompts]


def _body(arguments: argparse.Namespace, model: str, prompt: str | list[int], num_tokens: int) -> dict[str, Any]:
    asked = {"prompt": prompt} if arguments.endpoint == "completions" else {
        "messages": [{"role": "user", "content": prompt}]
    }  # fmt: skip
    return {
        "model": model,
        **asked,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _random_prompts(arguments: argparse.Namespace) -> Iterator[tuple[str | list[int], int]]:
    """Yields random prompts with the most tokens of their answers. Prompts are token ids, so that nothing is tokenized;
    for chats they are words, about a token each."""
    rng = random.Random(arguments.seed)
    prefix = [rng.randrange(arguments.vocab_size) for _ in range(min(arguments.shared_prefix, arguments.input_tokens))]
    for _ in range(arguments.num_requests):
        ids = [*prefix, *(rng.randrange(arguments.vocab_size) for _ in range(arguments.input_tokens - len(prefix)))]
        words = " ".join(_WORDS[i % len(_WORDS)] for i in ids) if arguments.endpoint == "chat" else ""
        yield words or ids, arguments.output_tokens or DEFAULT_OUTPUT_TOKENS


def _conversations(arguments: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """First questions, each with about the length of its answer in tokens; the same again where there are too few."""
    try:
        found = [_first_turn(each) for each in json.loads(Path(arguments.dataset_path).read_text())]
    except OSError as error:
        raise ConfigError(f"can't read --dataset-path {arguments.dataset_path!r}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ConfigError(
            f"{arguments.dataset_path} is no file in ShareGPT's format: "
            '[{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}]'
        ) from None
    turns = [(text, answer) for text, answer in found if text and answer]
    if not turns:
        raise ConfigError(f"{arguments.dataset_path} has no conversation of a question and an answer")
    random.Random(arguments.seed).shuffle(turns)
    for index in range(arguments.num_requests):
        text, answer = turns[index % len(turns)]
        yield text, arguments.output_tokens or max(1, len(answer) // CHARACTERS_A_TOKEN)


def _first_turn(conversation: dict[str, Any]) -> tuple[str, str]:
    """A conversation's first question and its answer; both "" where there is none."""
    turns = [str(turn["value"]) for turn in conversation.get("conversations", [])[:2]]
    return (turns[0], turns[1]) if len(turns) == 2 else ("", "")
