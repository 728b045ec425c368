"""Beam search as a pure object: candidates of each beam in, the next beams and the best hypotheses out.

It decides as transformers' `generate(num_beams=…)` does, in the same float32: a step takes the best continuations of
all beams together; those of the first `width` that end become hypotheses, and the best `width` that don't end go on.
The search is over when all continuations end, or when no beam can become better than the worst of `width` hypotheses,
as far as `early_stopping` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import Candidates, FinishReason, TokenLogprobs


def num_candidates(sampling: SamplingParams, num_end_ids: int) -> int:
    """How many candidates of each beam suffice: then `width` of all that don't end are among them, however many of the
    ids that end an output come before."""
    return 2 * sampling.beam_width + num_end_ids


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """One token behind those of the beam `before`, which was number `parent` among the beams; `before` None: the
    prompt's end, and no token. `sum_logprobs` (a float32) is over all tokens. `finish_reason` None: it goes on."""

    before: Beam | None = None
    parent: int = 0
    token_id: int = -1
    sum_logprobs: float = 0.0
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    is_stop_token: bool = False

    def path(self) -> list[Beam]:
        """The beams on the way to this one, itself included, each with its token."""
        found: list[Beam] = []
        beam: Beam | None = self
        while beam is not None and beam.before is not None:
            found.append(beam)
            beam = beam.before
        return found[::-1]


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """A beam that has ended. `score`: its log-probability divided by its length to the length penalty."""

    beam: Beam
    score: np.float32


class BeamSearch:
    """One request's search. `beams` are those that go on, best first; `hypotheses` those that ended, best first."""

    def __init__(self, sampling: SamplingParams, end_ids: Collection[int], max_tokens: int) -> None:
        """`end_ids`: tokens that end an output; `max_tokens`: the most that one may have."""
        assert sampling.beam_width > 0
        assert max_tokens > 0
        self.width = sampling.beam_width
        self.beams = [Beam()]
        self.hypotheses: list[Hypothesis] = []
        self.is_over = False
        self._sampling, self._end_ids, self._max_tokens = sampling, frozenset(end_ids), max_tokens
        self.num_tokens = 0  # of each beam

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """One step: `candidates[i]` may follow `beams[i]`. All that was a beam before is over; what goes on names it as
        its `parent`."""
        assert not self.is_over
        assert len(candidates) == len(self.beams), "a beam has no candidates"
        best = self._best(candidates)
        self.num_tokens += 1
        ended = [beam for beam in best[: self.width] if beam.finish_reason is not None]
        self._note([Hypothesis(beam, self._score(beam, self.num_tokens)) for beam in ended])
        self.beams = [beam for beam in best if beam.finish_reason is None][: self.width]
        self.is_over = not self.beams or not self._may_improve()

    def _best(self, candidates: Sequence[Candidates]) -> list[Beam]:
        """All continuations, best first; of equals the better beam's, then the lower token's."""
        found = []
        for parent, (before, given) in enumerate(zip(self.beams, candidates, strict=True)):
            sums = np.float32(before.sum_logprobs) + np.array(given.logprobs, np.float32)
            for rank, (token_id, total) in enumerate(zip(given.token_ids, sums, strict=True), 1):
                if total > -np.inf:
                    found.append((-total, parent, token_id, rank))
        found.sort()
        return [self._continue(candidates[parent], parent, rank, -total) for total, parent, _, rank in found]

    def _continue(self, given: Candidates, parent: int, rank: int, total: float) -> Beam:
        token_id, num_likely = given.token_ids[rank - 1], self._sampling.num_logprobs
        logprobs = None
        if num_likely is not None:
            token_ids = (token_id, *given.token_ids[:num_likely])
            logprobs = TokenLogprobs(token_ids, (given.logprobs[rank - 1], *given.logprobs[:num_likely]), rank)
        is_stop_token = token_id in self._end_ids and self.num_tokens >= self._sampling.min_tokens
        reason: FinishReason | None = None
        if is_stop_token or token_id in given.ends:
            reason = "stop"
        elif self.num_tokens + 1 >= self._max_tokens:
            reason = "length"
        return Beam(self.beams[parent], parent, token_id, total, logprobs, reason, is_stop_token)

    def _note(self, ended: list[Hypothesis]) -> None:
        self.hypotheses = sorted([*self.hypotheses, *ended], key=lambda each: -each.score)[: self.width]

    def _score(self, beam: Beam, num_tokens: int) -> np.float32:
        return np.float32(beam.sum_logprobs / np.float32(num_tokens**self._sampling.length_penalty))

    def _may_improve(self) -> bool:
        """Whether the best beam could still displace a hypothesis. How good it can become is a guess of the search's
        settings: as good as it is now, or, where longer outputs are preferred and that is "never" guessed, as good as
        at the longest."""
        if len(self.hypotheses) < self.width:
            return True
        if self._sampling.early_stopping is True:
            return False
        is_longest = self._sampling.early_stopping == "never" and self._sampling.length_penalty > 0
        num_tokens = self._max_tokens if is_longest else self.num_tokens
        return bool(self._score(self.beams[0], num_tokens) > self.hypotheses[-1].score)
