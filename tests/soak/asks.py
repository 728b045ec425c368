"""Random requests of all kinds, their right answers, and how two answers differ."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

VOCABULARY = 2048  # the demo model's
LOGPROB_TOLERANCE = 2e-3
RANKS_ALIKE = 50  # rank 170 may be 167 to 173, rank 49 is 49; a guess, seen once: 170 for 169
NEAR_DRAW = 1e-4  # of sampled ones; seen once: 0.000005, and transformers took the other
NEAR_TIE = 1e-3  # two best logprobs closer than this may change places with the batch's shape
FIELDS_OF_CHOICES = ("text", "token_ids", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs")
Choices = dict[int, dict[str, Any]]


class Refused(Exception):
    """The server's own error: HTTP status (0: inside a stream) and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


@dataclass(frozen=True)
class Ask:
    body: dict[str, Any]
    expected: Choices | None  # None: any answer will do


class Abandoned(Exception):
    """The client left on purpose."""


def random_body(rng: random.Random, beginnings: list[list[int]]) -> dict[str, Any]:
    """1 to 900 tokens of prompt, often begun like others, 1 to 250 tokens asked for, and any of the options."""
    prompt = [rng.randrange(2, VOCABULARY) for _ in range(rng.choice((1, 5, 17, 40, 90, 180)))]
    if rng.random() < 0.6:
        prompt = rng.choice(beginnings) + prompt
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": rng.choice((1, 8, 30, 60, 120, 250)), "temperature": 0}
    body["return_token_ids"] = True
    body["ignore_eos"] = rng.random() < 0.7
    if rng.random() < 0.4:
        body |= {"temperature": rng.choice((0.5, 1.0)), "seed": rng.randrange(1 << 40), "top_p": rng.choice((1, 0.9))}
    chosen = {
        "n": rng.choice((2, 3, 4)),
        "stop": rng.sample(["the", "self", "\n", "er", "1"], 2),
        "logprobs": rng.choice((0, 1, 5)),
        "prompt_logprobs": rng.choice((0, 2)),
        "echo": True,
        "presence_penalty": rng.choice((-0.5, 0.7)),
        "frequency_penalty": rng.choice((-0.3, 0.4)),
        "repetition_penalty": 1.2,
        "logit_bias": {str(rng.randrange(2, VOCABULARY)): rng.choice((-100, 3)) for _ in range(3)},
        "min_tokens": 1,
    }
    return body | {name: value for name, value in chosen.items() if rng.random() < 0.15}


def make_asks(url: str, rng: random.Random, count: int, model: Path) -> list[Ask]:
    """Asked one after the other of a server of this model that nobody disturbs; without those that a tie decides."""
    beginnings = [[rng.randrange(2, VOCABULARY) for _ in range(length)] for length in (64, 130, 300, 500, 700)]
    asks: list[Ask] = []
    with httpx.Client(base_url=url, timeout=300) as client:
        for _ in range(4 * count):
            body = random_body(rng, beginnings)
            expected = ask(client, body)
            if not (_is_near_tie(client, body) if body["temperature"] == 0 else _is_near_draw(client, body, model)):
                asks.append(Ask(body, expected))
            if len(asks) == count:
                return asks
    raise AssertionError(f"{len(asks)} of {4 * count} random requests have a clear answer")


def _is_near_tie(client: httpx.Client, body: dict[str, Any]) -> bool:
    """Whether a greedy choice was between two equally good tokens."""
    plain = {name: value for name, value in body.items() if name not in ("logprobs", "echo", "prompt_logprobs", "n")}
    (choice,) = ask(client, {**plain, "logprobs": 2}).values()
    for best in choice["logprobs"]["top_logprobs"]:
        first, second, *_ = [*sorted(best.values(), reverse=True), -1e9]
        if first - second < NEAR_TIE:
            return True
    return False


def _is_near_draw(client: httpx.Client, body: dict[str, Any], model: Path) -> bool:
    """Whether a sampled choice was between two tokens that are equally good, noise included, by the logits of
    transformers; also where those choose another token, whatever for."""
    plain = {name: value for name, value in body.items() if name not in ("logprobs", "echo", "prompt_logprobs", "stop")}
    return any(
        gap < NEAR_DRAW
        for index, choice in ask(client, plain).items()
        for gap in _gaps(body, index, choice["token_ids"], model)
    )


def _gaps(body: dict[str, Any], sample: int, token_ids: list[int], model: Path) -> Iterator[float]:
    """By how much each token was better than the next best one; negative where another is better."""
    import torch

    from tandem.kernels.reference.sampling import gumbel_noise, kept_tokens

    prompt = body["prompt"]
    with torch.no_grad():
        logits = reference_model(model)(torch.tensor([prompt + token_ids[:-1]])).logits[0, len(prompt) - 1 :]
    for place, (logits_V, token) in enumerate(zip(logits, token_ids, strict=True)):
        for banned, bias in body.get("logit_bias", {}).items():
            logits_V[int(banned)] += bias
        made = torch.bincount(torch.tensor(token_ids[:place], dtype=torch.int64), minlength=len(logits_V))
        seen, repetition = made > 0, body.get("repetition_penalty", 1.0)
        anywhere = seen.clone()
        anywhere[prompt] = True
        repeated = torch.where(logits_V > 0, logits_V / repetition, logits_V * repetition)
        logits_V = torch.where(anywhere, repeated, logits_V)
        logits_V = logits_V - body.get("frequency_penalty", 0.0) * made - body.get("presence_penalty", 0.0) * seen
        scaled_V = logits_V / body["temperature"]
        scores = scaled_V.double() + gumbel_noise(body["seed"], sample, place, len(logits_V))
        scores[~kept_tokens(logits_V, scaled_V, 0, body["top_p"], 0.0)] = -torch.inf
        others = scores.clone()
        others[token] = -torch.inf
        yield float(scores[token] - others.max())


@cache
def reference_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def ask(client: httpx.Client, body: dict[str, Any], stream: bool = False, leave_after: int = 0) -> Choices:
    """Choices by index. Raises Refused, httpx.TransportError; Abandoned after `leave_after` events, unless 0."""
    choices: Choices = {}
    with client.stream("POST", "/v1/completions", json={**body, "stream": stream}) as answer:
        if answer.status_code != 200:
            raise Refused(answer.status_code, json.loads(answer.read())["error"]["message"])
        if not stream:
            _add(choices, json.loads(answer.read()))
            return choices
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        for number, line in enumerate(lines):
            if line == "[DONE]":
                return choices
            _add(choices, json.loads(line))
            if number + 1 == leave_after:
                raise Abandoned
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


def _add(choices: Choices, event: dict[str, Any]) -> None:
    if "error" in event:
        raise Refused(0, event["error"]["message"])
    for choice in event["choices"]:
        known = choices.setdefault(choice["index"], {})
        merged = _merge(known, {name: choice[name] for name in FIELDS_OF_CHOICES if choice.get(name) is not None})
        choices[choice["index"]] = merged


def _merge(old: Any, new: Any) -> Any:
    """What two parts of a streamed choice are together."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merge(old.get(name), value) for name, value in new.items()}
    if isinstance(old, list) and isinstance(new, list):
        return old + new
    if isinstance(old, str) and isinstance(new, str):
        return old + new
    return old if new is None else new


def difference(expected: Any, got: Any, where: str = "") -> str:
    """The first difference in words; "" if there is none. Floats may differ by LOGPROB_TOLERANCE, ranks by as much as
    rounding makes of unlikely tokens that are almost equally so."""
    if where.endswith(".rank") and isinstance(expected, int) and isinstance(got, int):
        return "" if abs(expected - got) <= expected // RANKS_ALIKE else f"{where}: {got!r}, not {expected!r}"
    if isinstance(expected, float) or isinstance(got, float):
        same = isinstance(expected, int | float) and isinstance(got, int | float)
        return "" if same and abs(expected - got) <= LOGPROB_TOLERANCE else f"{where}: {got!r}, not {expected!r}"
    if isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            return f"{where}: {sorted(map(str, got))}, not {sorted(map(str, expected))}"
        parts = [difference(value, got[name], f"{where}.{name}") for name, value in expected.items()]
        return next(filter(None, parts), "")
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return f"{where}: {len(got)} entries, not {len(expected)}"
        parts = [difference(a, b, f"{where}[{i}]") for i, (a, b) in enumerate(zip(expected, got, strict=True))]
        return next(filter(None, parts), "")
    return "" if expected == got else f"{where}: {got!r}, not {expected!r}"
