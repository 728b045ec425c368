"""What happened to one prompt at the router, as it is told afterwards: no texts, no tokens, no keys. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets

MOST_MOMENTS = 128  # a guess: a request has some ten, one that is tried again and moved about some more
MOST_TEXT = 200  # characters of what nodes and clients say
MOST_NAMES = 3  # the request's own, its client's, X-Request-Id


def shortened(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"


@dataclass(frozen=True, slots=True)
class StoryMoment:
    """Something that happened, `at` monotonic seconds."""

    at: float
    what: str
    facts: dict[str, Any]


@dataclass(eq=False, slots=True)
class RequestStory:
    """One prompt's story. Times are monotonic seconds, but for `clock_at`, which is its arrival in Unix time."""

    request_id: str
    names: tuple[str, ...]  # by which it can be asked for
    started_at: float
    clock_at: float
    num_prompt_tokens: int
    max_tokens: int
    num_samples: int
    targets: Targets = NO_TARGETS
    moments: list[StoryMoment] = field(default_factory=list)
    asked: dict[NodeKey, dict[str, None]] = field(default_factory=dict)  # sub-requests, by the nodes that heard of them
    nodes: tuple[str, ...] = ()  # of the newest placement: who computes the prompt, who makes the tokens
    num_attempts: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    last_token_at: float = 0.0
    longest_gap_s: float = 0.0
    outcome: str = ""  # "finished", or the error's code
    num_output_tokens: int = 0
    num_cached_tokens: int = 0

    def note(self, at: float, what: str, **facts: Any) -> None:
        if len(self.moments) < MOST_MOMENTS:
            shown = {name: shortened(value) if isinstance(value, str) else value for name, value in facts.items()}
            self.moments.append(StoryMoment(at, what, shown))

    def sent(self, node: NodeKey, request_id: str) -> None:
        self.asked.setdefault(node, {})[request_id] = None

    def placed(self, at: float, prefill: str | None, primary: str, reason: str) -> None:
        self.num_attempts += 1
        self.nodes = (primary,) if prefill is None else (prefill, primary)
        self.note(at, "placed", nodes=list(self.nodes), reason=reason, attempt=self.num_attempts)

    def first_token(self, at: float) -> None:
        self.first_token_at = at
        self.note(at, "first token")

    def waited(self, gap_s: float) -> None:
        """Takes the time between two tokens."""
        if gap_s > self.longest_gap_s:
            self.longest_gap_s = gap_s

    def end(
        self, at: float, outcome: str, num_output_tokens: int, num_cached_tokens: int, last_token_at: float
    ) -> None:
        self.ended_at, self.outcome = at, outcome
        self.num_output_tokens, self.num_cached_tokens = num_output_tokens, num_cached_tokens
        self.last_token_at = last_token_at
        self.note(at, "end", outcome=outcome)

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first, on average over its samples; None: there is none."""
        rest = self.num_output_tokens / self.num_samples - 1
        if self.first_token_at is None or rest <= 0 or not self.last_token_at:
            return None
        return max(0.0, self.last_token_at - self.first_token_at) / rest

    @property
    def kept_promise(self) -> bool | None:
        """Whether it ended as it should and within its own targets; None: it has none, or runs."""
        targets = self.targets
        if self.ended_at is None or not (targets.ttft_s or targets.tpot_s):
            return None
        if self.outcome != "finished" or self.first_token_at is None:
            return False
        tpot_s = self.tpot_s or 0.0
        is_early = not targets.ttft_s or self.first_token_at - self.started_at <= targets.ttft_s
        return is_early and (not targets.tpot_s or tpot_s <= targets.tpot_s)

    def slack_s(self, now: float, since: float = math.inf) -> float | None:
        """How much sooner than promised the first token may still come, or came after `since`; None: it was there
        before, or nothing was promised."""
        came_at = self.first_token_at
        is_over = self.ended_at is not None if came_at is None else came_at < since
        if not self.targets.ttft_s or is_over:
            return None
        return self.started_at + self.targets.ttft_s - (now if came_at is None else came_at)

    def summary(self, now: float) -> dict[str, Any]:
        """The story in a line, for JSON: times in seconds since its arrival."""
        end = self.ended_at

        def since(at: float | None) -> float | None:
            return None if at is None else round(at - self.started_at, 4)

        return {
            "id": self.request_id,
            "names": [shortened(name) for name in self.names],
            "at": round(self.clock_at, 3),
            "age_s": round(now - self.started_at, 3),
            "state": self.outcome or ("streaming" if self.first_token_at else "prefilling" if self.nodes else "queued"),
            "prompt_tokens": self.num_prompt_tokens,
            "cached_tokens": self.num_cached_tokens,
            "output_tokens": self.num_output_tokens if end is not None else None,
            "nodes": list(self.nodes),
            "attempts": self.num_attempts,
            "ttft_s": since(self.first_token_at),
            "tpot_s": None if self.tpot_s is None else round(self.tpot_s, 5),
            "duration_s": since(end),
            "kept": self.kept_promise,
        }
