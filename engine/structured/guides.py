"""Where each sample of the batch stands in its grammar, and what it may say next.

A sample may also be held to some token ids, or away from sequences of them (`token_limits.py`): one mask has both.

A step's masks are filled when the tokens of the step before are known, while the device computes its logits; a token
is taken when the host hears of it. A sample's state is a function of its grammar and its output so far, so it is made
anew wherever a sequence enters a slot: after a hand-off, a move, a preemption, or in the next attempt.

M guided samples of a step, W words of a mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import Candidates
from tandem.engine.scheduling.speculation.verdicts import runs_of
from tandem.engine.scheduling.step import ForkSlot, NewSlot, SampleRow
from tandem.engine.structured.grammars import Grammars, shown
from tandem.engine.structured.token_limits import TokenLimits

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Guide:
    """One sample's place in its grammar, if it has one, and its limits. `error`: why it can't go on; "": it can."""

    __slots__ = ("error", "has_ended", "limits", "matcher")

    def __init__(self, matcher: LLMatcher | None, limits: TokenLimits | None = None, error: str = "") -> None:
        self.matcher, self.limits, self.error, self.has_ended = matcher, limits, error, False

    @classmethod
    def behind(cls, grammars: Grammars, sampling: SamplingParams, output: Sequence[int]) -> Guide:
        """A guide that has taken `output`."""
        has_limits = bool(sampling.allowed_token_ids or sampling.bad_words)
        limits = TokenLimits(sampling, grammars, output) if has_limits else None
        if not sampling.grammar:
            return cls(None, limits)
        try:
            matcher = grammars.matcher(sampling.grammar)
        except ValueError as error:
            return cls(None, error=f"the grammar can't be followed: {error}")
        if output and not matcher.consume_tokens(list(output)):
            return cls(None, error=f"the output so far doesn't follow the grammar: {shown(matcher.get_error())}")
        return cls(matcher, limits, "the output so far has ended its grammar" if matcher.is_stopped() else "")

    def copy(self) -> Guide:
        matcher = None if self.matcher is None else self.matcher.deep_copy()
        return Guide(matcher, None if self.limits is None else self.limits.copy(), self.error)

    def behind_draft(self, token_id: int) -> Guide:
        """A guide for what may follow if the next token is this guess. Behind a guess that is not allowed, whose sample
        nobody keeps, it limits nothing."""
        ahead = self.copy()
        ahead.has_ended = self.has_ended
        if ahead.is_open:
            ahead.take(token_id)
        return ahead

    def fail_as(self, ahead: Guide) -> None:
        """Takes over the error, if any, of a guide that stood here before it was known that this one would."""
        self.error = self.error or ahead.error

    @property
    def is_open(self) -> bool:
        """Whether the guide limits the next token. What is drawn after an end or an error is dropped."""
        return not self.has_ended and not self.error

    def check(self, has_mask: bool) -> None:
        """Looks for an error after a mask was filled. `has_mask`: the mask allows some token."""
        if self.matcher is not None and self.matcher.is_error():
            self.error = f"the grammar can't be followed further: {shown(self.matcher.get_error())}"
        elif not has_mask and self.limits is None:
            self.error = "the grammar can't be followed further: no token of this model continues it"
        elif not has_mask:
            self.error = "allowed_token_ids, bad_words and what the output must be leave no token to go on with"

    def ends_with(self, token_id: int) -> bool:
        """Whether `token_id` would be the last that the grammar has room for."""
        if self.matcher is None:
            return False
        ahead = self.matcher.deep_copy()
        return bool(ahead.consume_token(token_id) and ahead.is_stopped())

    def take(self, token_id: int) -> None:
        if self.limits is not None:
            self.limits.take(token_id)
        if self.matcher is None:
            return
        if self.matcher.consume_token(token_id):
            self.has_ended = self.matcher.is_stopped()
        else:
            self.error = f"the grammar was left: {shown(self.matcher.get_error())}"


class GuidedSamples:
    """The samples of one step that have guides; `indices` are their places among the step's samples. After `take`,
    `ended` and `failed` say which of them have ended, and which failed and why, `ends` which candidates of a beam end
    its grammar."""

    def __init__(self, grammars: Grammars, indices: list[int], guides: list[Guide], drafts: list[int]) -> None:
        """`drafts`: each sample's, as SampleRow has them; those of one sequence have one guide."""
        self._grammars, self.indices, self._guides, self._drafts = grammars, indices, guides, drafts
        self._ahead: list[Guide] = []  # where each sample stands if the drafts before it are right
        self.ended: set[int] = set()
        self.failed: dict[int, str] = {}
        self.ends: dict[int, tuple[int, ...]] = {}
        self._was_taken = False

    @property
    def mask_shape(self) -> tuple[int, int]:
        return len(self.indices), self._grammars.num_words

    def fill(self, masks_MW: np.ndarray) -> None:
        """Writes int32 masks, whose bit t % 32 of word t // 32 allows the token t. At least one is allowed."""
        from llguidance.numpy import fill_next_token_bitmask_par

        for guide, draft in zip(self._guides, self._drafts, strict=True):
            self._ahead.append(guide if draft < 0 else self._ahead[-1].behind_draft(draft))
        matchers = [(guide.matcher, i) for i, guide in enumerate(self._ahead) if guide.is_open and guide.matcher]
        if matchers:
            fill_next_token_bitmask_par(self._grammars.executor, matchers, masks_MW)
        for i, guide in enumerate(self._ahead):
            if guide.matcher is None:
                masks_MW[i] = -1
            if guide.limits is not None:
                guide.limits.narrow(masks_MW[i])
        has_any_M = np.any(masks_MW, axis=1).tolist()
        for i, guide in enumerate(self._ahead):
            if guide.is_open:
                guide.check(has_any_M[i])
            if not guide.is_open:
                masks_MW[i] = -1

    def take(self, token_ids: np.ndarray, candidates: Mapping[int, Candidates] | None = None) -> None:
        """Advances the guides by what was drawn. `token_ids` are those of all samples of the step, `candidates` those
        of beams by sample, which are looked through first. Idempotent."""
        if self._was_taken:
            return
        self._was_taken = True
        for run in runs_of(self._drafts, token_ids[self.indices].tolist()):
            for place in range(run.first, run.kept):
                self._take(place, token_ids, candidates)

    def _take(self, place: int, token_ids: np.ndarray, candidates: Mapping[int, Candidates] | None) -> None:
        index, guide = self.indices[place], self._guides[place]
        if self._drafts[place] >= 0:
            guide.fail_as(self._ahead[place])
        if guide.is_open and candidates and index in candidates:
            self.ends[index] = tuple(each for each in candidates[index].token_ids if guide.ends_with(each))
        if guide.is_open:
            guide.take(int(token_ids[index]))
        if guide.error:
            self.failed[index] = guide.error
        elif guide.has_ended:
            self.ended.add(index)


class Guides:
    """The guides of a runner's slots. A prompt's samples may share a slot: each of them has a guide."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._first: dict[int, Guide] = {}  # by slot, as its sequence entered
        self._of_sample: dict[tuple[int, int], Guide] = {}  # by slot and sample index

    def apply(self, new_slots: Sequence[NewSlot], forks: Sequence[ForkSlot]) -> None:
        """Takes in what enters the batch; whatever had those slots before is forgotten."""
        for new in new_slots:
            self._forget(new.slot)
            if new.sampling.is_guided:
                output = new.token_ids[new.num_prompt_tokens :].tolist()
                self._first[new.slot] = Guide.behind(self._grammars, new.sampling, output)
        for fork in forks:
            self._forget(fork.slot)
            if fork.parent_slot in self._first:
                self._first[fork.slot] = self._first[fork.parent_slot].copy()

    def of(self, samples: Sequence[SampleRow]) -> GuidedSamples | None:
        """The rows of `samples` that have a guide; None: none has."""
        if not self._first:
            return None
        indices = [i for i, sample in enumerate(samples) if sample.slot in self._first]
        if not indices:
            return None
        guides = [self._guide(samples[i].slot, samples[i].sample_index) for i in indices]
        return GuidedSamples(self._grammars, indices, guides, [samples[i].draft for i in indices])

    def _guide(self, slot: int, sample_index: int) -> Guide:
        guide = self._of_sample.get((slot, sample_index))
        if guide is None:
            guide = self._of_sample[slot, sample_index] = self._first[slot].copy()
        return guide

    def _forget(self, slot: int) -> None:
        if self._first.pop(slot, None) is not None:
            self._of_sample = {key: guide for key, guide in self._of_sample.items() if key[0] != slot}
