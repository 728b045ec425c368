"""The rates at which a cluster works, computed from two readings of its router's /metrics. Pure."""

from __future__ import annotations

import re

ACTIVE = "tandem_router_active_prompts"
COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "tandem_router_cached_tokens_total")
_SAMPLE = re.compile(rf"^({'|'.join((ACTIVE, *COUNTERS))})(?:{{.*}})? (\S+)$", re.MULTILINE)


class Rates:
    """Compares each reading of the metrics with the one before."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        self._read_at = 0.0

    def line(self, metrics: str, now: float) -> str:
        """A line of rates for people; "" when nothing was under way since the last reading, or `metrics` can't be read.
        `now`: monotonic seconds."""
        read = {name: float(value) for name, value in _SAMPLE.findall(metrics)}
        before, passed_s = self._before, now - self._read_at
        self._before, self._read_at = read, now
        if not before or not {ACTIVE, *COUNTERS} <= read.keys() & before.keys() or passed_s <= 0:
            return ""
        # A router that started again counts from nothing.
        output, prompt, cached = (max(0.0, read[name] - before[name]) for name in COUNTERS)
        active = int(read[ACTIVE])
        if not active and not output:
            return ""
        share = f", {cached / prompt:.0%} of them cached" if prompt else ""
        requests = f"{active} request{'s' * (active != 1)} under way"
        return f"{requests}; {output / passed_s:,.1f} output and {prompt / passed_s:,.1f} prompt tokens a second{share}"
