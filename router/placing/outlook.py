"""What a router expects of a node: its last report, what was placed there since, and what it has done since. Pure.

A node's prompts are foreseen by the rule by which it orders them itself (engine/contracts/rate.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import LATE_STRETCH, Due, fewest_late
from tandem.engine.contracts.wire.work import NodeReport

# The rate of a node until it has measured its own.
PREFILL_S_PER_TOKEN = 1 / 20_000  # a guess
LATELY_S = 300.0  # half-life of `recent_s`: of the order of what a cache holds; a guess
LEAST_S_PER_TOKEN = 1e-9  # whatever a node says: seconds are divided by it; a guess


class Forecast(NamedTuple):
    """What becomes of a node's prompts. `own_s`: until the one in question has its first token."""

    num_late: int
    others_s: float  # when the others have theirs, summed
    own_s: float


class Outlook:
    """One node, as one router process sees it. Times are seconds of one monotonic clock."""

    def __init__(self, key: NodeKey, report: NodeReport, now: float = 0.0) -> None:
        self.key = key
        self.num_placed = 0  # streams that the report doesn't show
        self.num_placed_tokens = 0  # their context
        self.recent_s = 0.0  # seconds of prompt work that were placed there, what is long ago forgotten
        self._heard_at = now
        self._unseen: list[tuple[float, Due[int], int, int]] = []  # when, the prompt, new streams and their tokens
        self._prompts: list[Due[int]] = []
        self._is_ordered, self._num_late = False, 0
        self._ends_s: float | None = None  # until its prompts end, summed, from `_free_at` on; None: to be found out
        self.note_report(report, now, now)

    @property
    def num_streams(self) -> int:
        return self.report.num_streams + self.num_placed

    def note_report(self, report: NodeReport, seen_until: float, now: float) -> None:
        """Takes a report. What was placed after `seen_until` is not in it."""
        self.report = report
        self.recent_s *= 0.5 ** (max(0.0, now - self._heard_at) / LATELY_S)
        self._heard_at = now
        least_s = report.least_s_per_token or report.s_per_token or PREFILL_S_PER_TOKEN
        self.least_s_per_token = max(least_s, LEAST_S_PER_TOKEN)
        self.s_per_token = max(report.s_per_token, self.least_s_per_token)
        self._unseen = [each for each in self._unseen if each[0] > seen_until]
        self.num_placed = sum(streams for _, _, streams, _ in self._unseen)
        self.num_placed_tokens = sum(num_tokens for _, _, _, num_tokens in self._unseen)
        self._free_at = now + report.free_s
        self._prompts = [Due(0, now + due_s, left, order=index) for index, (due_s, left) in enumerate(report.prompts)]
        if report.num_more_tokens:
            due_at = max((each.due_at for each in self._prompts), default=now)
            self._prompts.append(Due(0, due_at, report.num_more_tokens, order=len(self._prompts)))
        self._prompts += [due for _, due, _, _ in self._unseen if due.num_tokens]
        self._count = len(self._prompts) + len(self._unseen)
        self._changed()

    def note_placement(
        self, num_tokens: int, due_at: float, num_streams: int, now: float, num_stream_tokens: int = 0
    ) -> None:
        """Counts a placement of prompt tokens (0: none), streams, or both."""
        self._work_off(now)
        self._count += 1
        due = Due(0, due_at, num_tokens, order=self._count)
        self._unseen.append((now, due, num_streams, num_stream_tokens))
        self.recent_s += num_tokens * self.s_per_token
        self.num_placed += num_streams
        self.num_placed_tokens += num_stream_tokens
        if num_tokens:
            self._prompts.append(due)
            self._changed()

    def backlog_s(self, now: float) -> float:
        """Seconds until it has computed all the prompts that it has."""
        self._work_off(now)
        return self._free_at - now + self._num_tokens * self.s_per_token

    def has_prompts(self, now: float) -> bool:
        self._work_off(now)
        return bool(self._prompts)

    def seconds_for(self, begin: int, end: int) -> float:
        """What these tokens of a prompt take here, if those before them are found."""
        num_new, growth = end - begin, self.report.attention_growth
        alone_s = num_new * self.least_s_per_token * (1 + (begin + num_new / 2) * growth)
        return max(alone_s, num_new * self.s_per_token)

    def late_s(self, now: float) -> float:
        """Seconds of work for prompts that will be late."""
        self._work_off(now)
        self._order()
        return sum(each.num_tokens for each in self._prompts[len(self._prompts) - self._num_late :]) * self.s_per_token

    def without(self, now: float) -> Forecast:
        """What becomes of its prompts if no other comes. Kept until something comes or ends."""
        self._work_off(now)
        if self._ends_s is None:
            self._order()
            at = ends_s = 0.0
            for due in self._prompts:
                at += due.num_tokens * self.s_per_token
                ends_s += at
            self._ends_s = ends_s
        return Forecast(self._num_late, self._ends_s + (self._free_at - now) * len(self._prompts), 0.0)

    def forecast(self, now: float, seconds: float, due_at: float) -> Forecast:
        """What becomes of its prompts beside another one that takes so many seconds."""
        self._work_off(now)
        token_s, free_s = self.s_per_token, self._free_at - now
        ours = Due(1, due_at, max(1, round(seconds / token_s)), order=self._count + 1)
        on_time, late = fewest_late([*self._prompts, ours], token_s, self._free_at)
        at, own_s, others_s = free_s, 0.0, 0.0
        for due in (*on_time, *self._by_patience(late)):
            at += due.num_tokens * token_s
            if due.prompt:
                own_s = at
            else:
                others_s += at
        return Forecast(len(late), others_s, own_s)

    def _changed(self) -> None:
        self._is_ordered, self._num_late = False, 0
        self._num_tokens = sum([due.num_tokens for due in self._prompts])
        self._ends_s = None

    def _order(self) -> None:
        """Puts its prompts in the order in which it will compute them, the late ones last."""
        if not self._is_ordered:
            on_time, late = fewest_late(self._prompts, self.s_per_token, self._free_at)
            self._prompts, self._num_late = [*on_time, *self._by_patience(late)], len(late)
            self._is_ordered = True

    def _by_patience(self, late: list[Due[int]]) -> list[Due[int]]:
        patience_s = LATE_STRETCH * self.s_per_token
        return sorted(late, key=lambda due: (due.due_at + patience_s * due.num_tokens, due.order))

    def _work_off(self, now: float) -> None:
        """Takes away what the node has computed since the last time, in its order."""
        if now <= self._free_at:
            return
        if not self._prompts:
            self._free_at = now
            return
        num_done = int((now - self._free_at) / self.s_per_token)
        if not num_done:
            return
        self._order()
        self._free_at += num_done * self.s_per_token
        left: list[Due[int]] = []
        for due in self._prompts:
            worked = min(num_done, due.num_tokens)
            num_done -= worked
            if worked < due.num_tokens:
                left.append(replace(due, num_tokens=due.num_tokens - worked) if worked else due)
        if num_done:
            self._free_at = now
        self._num_late = min(self._num_late, len(left))
        self._prompts, self._ends_s = left, None
        self._num_tokens = sum([due.num_tokens for due in left])
