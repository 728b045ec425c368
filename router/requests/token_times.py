"""When tokens came to a router, for its metrics."""

from __future__ import annotations

from tandem.router.metrics.router_metrics import RouterMetrics
from tandem.router.requests.generation import Generation


class TokenTimes:
    """Measures when tokens come. Between `begin` and `end` the tokens of one message are counted together, since most
    gaps between tokens are equal there."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics
        self._now = 0.0
        self._num_tokens = 0
        self._gaps_s: dict[float, int] = {}  # gap between two tokens of a sample -> how often it occurred

    def begin(self, now: float) -> None:
        self._now, self._num_tokens, self._gaps_s = now, 0, {}

    def count(self, generation: Generation, sample_index: int, num_tokens: int) -> None:
        if generation.first_token_at is None:
            generation.first_token_at = self._now
            generation.story.first_token(self._now)
            self._metrics.model.ttft_s.observe(self._now - generation.started_at)
        previous = generation.last_token_at[sample_index]
        if previous:
            gap_s = self._now - previous
            self._gaps_s[gap_s] = self._gaps_s.get(gap_s, 0) + 1
            if num_tokens > 1:  # that a step with drafts made at once
                self._gaps_s[0.0] = self._gaps_s.get(0.0, 0) + num_tokens - 1
            story = generation.story
            if not story.longest_gap_s and len(story.nodes) > 1:
                self._metrics.handoff_gap_s.observe(gap_s)
            story.waited(gap_s)
            if sample_index in generation.moved_samples:
                generation.moved_samples.remove(sample_index)
                self._metrics.migration_pause_s.observe(gap_s)
        generation.last_token_at[sample_index] = self._now
        self._num_tokens += num_tokens

    def end(self) -> None:
        self._metrics.model.observe_step(self._gaps_s, self._num_tokens)
