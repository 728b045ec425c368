"""The newest requests of one router process, and how many prompts went from which node to which. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

from tandem.router.recent.story import RequestStory

KEPT = 512  # requests; a guess: some megabytes, and minutes at a few requests a second
MOST_PAIRS = 4096  # of nodes; 64 prefill nodes beside 64 decode nodes


class RecentRequests:
    """The newest `kept` requests, those that run among them."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._stories: OrderedDict[str, RequestStory] = OrderedDict()
        self._flows: dict[tuple[str, str], tuple[int, int]] = {}  # (prefill, decode) -> hand-offs, prompt tokens

    def begin(self, story: RequestStory) -> None:
        self._stories[story.request_id] = story
        if len(self._stories) > self._kept:
            self._stories.popitem(last=False)

    def flowed(self, source: str, sink: str, num_tokens: int) -> None:
        """Counts a prompt that one node computes for another."""
        number, tokens = self._flows.get((source, sink), (0, 0))
        if number or len(self._flows) < MOST_PAIRS:
            self._flows[source, sink] = number + 1, tokens + num_tokens

    def take_flows(self) -> dict[tuple[str, str], tuple[int, int]]:
        """What flowed since the last call, by (prefill, decode): prompts, and their tokens."""
        flows, self._flows = self._flows, {}
        return flows

    def find(self, name: str) -> list[RequestStory]:
        """The prompts of the newest request of that name: its own id, its client's, or X-Request-Id."""
        found: list[RequestStory] = []
        for story in reversed(self._stories.values()):
            if name in story.names and (not found or found[0].names[0] == story.names[0]):
                found.append(story)
        return found[::-1]

    def newest(self, most: int, now: float) -> list[dict[str, Any]]:
        """Summaries, the newest first."""
        found: list[dict[str, Any]] = []
        for story in reversed(self._stories.values()):
            if len(found) == most:
                break
            found.append(story.summary(now))
        return found

    def slacks(self, now: float, since: float = math.inf) -> list[float]:
        """The slack of each prompt that waits for a promised first token, or got it after `since`, in seconds; below 0
        when it is late."""
        found = (story.slack_s(now, since) for story in self._stories.values())
        return [slack for slack in found if slack is not None]
