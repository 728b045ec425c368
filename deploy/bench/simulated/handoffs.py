"""Hand-offs between simulated nodes: a source's link, and who has room at a sink. Pure.

A prompt's KV is pushed layer by layer while it is computed, once the sink has granted blocks. What is cached at the
source is pushed as the prompt begins, what the sink holds is not. A prompt without a grant is computed and waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.prompts import PromptWork


class Link:
    """What a node pushes goes one after the other."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._free_at = 0.0

    def pushed_with(self, work: PromptWork, now: float) -> None:
        """Notes a step that begins now: what it computes goes over the link."""
        for job, num_tokens in work.chunks:
            if job.is_granted:
                self._push(min(num_tokens, job.num_computed - job.num_held), now)

    def pushed_late(self, job: Job, now: float) -> None:
        """Notes that a prompt is granted room: what has been computed of it by now goes over the link."""
        self._push(job.num_computed - job.num_held, now)

    def ready_at(self, now: float) -> float:
        """When a prompt that is computed by now is ready to be decoded at its sink."""
        return max(now, self._free_at) + self._costs.handover_s

    def _push(self, num_tokens: int, now: float) -> None:
        self._free_at = max(self._free_at, now) + max(0, num_tokens) * self._costs.push_s_per_token


class Grants:
    """The room of a node that decodes: granted in the order of claims. `room`: tokens that are free of streams."""

    def __init__(self, room: Callable[[], int]) -> None:
        self._room = room
        self._claims: deque[Job] = deque()
        self.num_pending = 0  # tokens that are granted to sequences that are not here yet

    def claim(self, job: Job) -> None:
        self._claims.append(job)

    def granted(self) -> list[Job]:
        """Gives room to the jobs whose turn it is, as far as there is any, and returns them."""
        found = []
        while self._claims and self._claims[0].num_prompt_tokens <= self._room() - self.num_pending:
            job = self._claims.popleft()
            self.num_pending += job.num_prompt_tokens
            job.is_granted = True
            found.append(job)
        return found

    def taken(self, job: Job) -> None:
        """Notes that it is a stream from now on."""
        if job.is_granted:
            self.num_pending -= job.num_prompt_tokens
        elif job in self._claims:  # computed here in the end
            self._claims.remove(job)
