"""What a router expects of a node: its last report, what was placed there since, and what it has done since. Pure.

A node's prompts are foreseen by the rule by which it orders them itself (engine/contracts/rate.py)."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.rate import LATE_STRETCH, Due, fewest_late


class NodeReport(msgspec.Struct, frozen=True):
    """What a node tells of its work. Seconds count from when it tells."""

    role: str = "unified"
    s_per_token: float = 0.0  # of a prompt, beside the streams that run now; 0.0: not measured
    least_s_per_token: float = 0.0  # of a short prompt on the idle node
    double_at: float = math.inf  # tokens of context behind which a prompt's token takes twice as long
    free_s: float = 0.0  # until the step that runs has ended
    prompts: tuple[tuple[float, int], ...] = ()  # seconds until the first token is due, tokens that are left
    num_streams: int = 0
    step_s: float = 0.0  # of a step of its streams alone
    stream_s_per_token: float = 0.0  # what a stream adds to that, for each token of its context
    free_tokens: float = math.inf


class Forecast(NamedTuple):
    """What becomes of a node's prompts. `own_s`: until the one in question has its first token."""

    num_late: int
    others_s: float  # when the others have theirs, summed
    own_s: float


class Outlook:
    """One node, as one router process sees it."""

    def __init__(self, key: NodeKey, report: NodeReport) -> None:
        self.key = key
        self.report = report
        self.num_placed = 0  # streams that the report doesn't show
        self._prompts: list[Due[int]] = []
        self._unseen: list[tuple[int, Due[int], int]] = []  # placements: after which ping, the prompt, new streams
        self._free_at = 0.0
        self._count = 0

    @property
    def s_per_token(self) -> float:
        return max(self.report.s_per_token, self.report.least_s_per_token)

    @property
    def num_streams(self) -> int:
        return self.report.num_streams + self.num_placed

    def note_report(self, report: NodeReport, sequence: int, now: float) -> None:
        """Takes the answer to ping `sequence`: what was placed after that ping is not in it."""
        self.report = report
        self._unseen = [each for each in self._unseen if each[0] >= sequence]
        self.num_placed = sum(streams for _, _, streams in self._unseen)
        self._free_at = now + report.free_s
        self._prompts = [Due(index, now + due_s, left) for index, (due_s, left) in enumerate(report.prompts)]
        self._prompts += [due for _, due, _ in self._unseen if due.num_tokens]
        self._count = len(self._prompts)

    def note_placement(self, ping: int, num_tokens: int, due_at: float, num_streams: int) -> None:
        """Counts a placement of prompt tokens (0: none), streams, or both, at the time of the last forecast."""
        self._count += 1
        due = Due(self._count, due_at, num_tokens, order=self._count)
        self._unseen.append((ping, due, num_streams))
        self.num_placed += num_streams
        if num_tokens:
            self._prompts.append(due)

    def backlog_s(self, now: float) -> float:
        """Seconds until it has computed all the prompts that it has."""
        self._work_off(now)
        return self._free_at - now + sum(due.num_tokens for due in self._prompts) * self.s_per_token

    def forecast(self, now: float, seconds: float = 0.0, due_at: float = 0.0) -> Forecast:
        """What becomes of its prompts beside another one that takes so many seconds; 0.0: without one."""
        self._work_off(now)
        token_s = self.s_per_token
        prompts, ours = list(self._prompts), -1
        if seconds:
            prompts.append(Due(ours, due_at, max(1, round(seconds / token_s)), order=self._count + 1))
        on_time, late = fewest_late(prompts, token_s, self._free_at)
        late.sort(key=lambda due: (due.due_at + LATE_STRETCH * token_s * due.num_tokens, due.order))
        at, own_s, others_s = self._free_at, 0.0, 0.0
        for due in (*on_time, *late):
            at += due.num_tokens * token_s
            if due.prompt == ours:
                own_s = at - now
            else:
                others_s += at - now
        return Forecast(len(late), others_s, own_s)

    def _work_off(self, now: float) -> None:
        """Takes away what the node has computed since the last time, in its order."""
        if now <= self._free_at:
            return
        done = (now - self._free_at) / self.s_per_token if self._prompts else 0.0
        self._free_at = now
        if not done:
            return
        on_time, late = fewest_late(self._prompts, self.s_per_token, now)
        self._prompts = []
        for due in (*on_time, *late):
            worked = min(done, due.num_tokens)
            done -= worked
            if round(worked) < due.num_tokens:
                self._prompts.append(due._replace(num_tokens=due.num_tokens - round(worked)))
