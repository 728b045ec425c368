"""What nodes' heartbeats say, written down at each tick for the dashboard: all together, and each for its newest ticks.
Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.router.metrics.catalog import NODE_METRICS
from tandem.router.placing.view import NodeView
from tandem.router.watching.samples import KEPT_TICKS, TICK_S, grown

NODE_TICKS = 10  # over which a node's rates are averaged; a guess: heartbeats and steps are coarser than ticks
SLOW = tuple(metric.key for metric in NODE_METRICS if metric.family == "tandem_node_slow_steps")
OF_EACH = ("busy_s", "step_tokens", "step_rows", "kv_pushed_bytes")
# Counters of nodes that are followed, by the names of router/metrics/catalog.py.
FOLLOWED = (
    *OF_EACH,
    *SLOW,
    *("prompt_tokens", "cached_tokens", "tier_host_hit_tokens", "tier_disk_hit_tokens", "pull_tokens"),
    *("kv_push_s", "tier_loaded_bytes", "tier_fetched_bytes", "sink_commits", "sink_recomputes", "sink_failures"),
    *("preemptions", "migrations_finished"),
)
TIERS = ("host", "disk")


class FleetSample(msgspec.Struct, frozen=True):
    """One tick of all nodes together. `added` are counters' growths, and what `busy_s` went to, as `busy_prompts_s` and
    `busy_tokens_s`. `shares`: of the room of "pool", "host" and "disk" that is taken, 0 to 1; a tier that nobody has is
    left out."""

    number: int
    added: dict[str, float] = {}
    shares: dict[str, float] = {}
    nodes: int = 0
    running: int = 0
    waiting: int = 0


class _Track:
    """What one node counted in its newest ticks."""

    def __init__(self, counters: Mapping[str, float]) -> None:
        self._before = counters
        self._ticks: deque[tuple[float, ...]] = deque(maxlen=NODE_TICKS)

    def note(self, counters: Mapping[str, float]) -> dict[str, float]:
        """What was gained since the tick before."""
        gained, self._before = grown(self._before, counters), counters
        self._ticks.append(tuple(gained.get(name, 0.0) for name in OF_EACH))
        return gained

    def rate(self, name: str) -> float:
        """Growth a second."""
        at = OF_EACH.index(name)
        return sum(tick[at] for tick in self._ticks) / (len(self._ticks) * TICK_S) if self._ticks else 0.0


class FleetLog:
    """The newest samples of the nodes that this process is connected to."""

    def __init__(self) -> None:
        self.samples: deque[FleetSample] = deque(maxlen=KEPT_TICKS)
        self._tracks: dict[NodeKey, _Track] = {}

    def take(self, number: int, views: Iterable[NodeView]) -> None:
        """Writes a tick down."""
        views, added = list(views), dict[str, float]()
        tracks: dict[NodeKey, _Track] = {}
        for view in views:
            counters = view.status.counters
            now = {name: counters.get(name, 0.0) for name in FOLLOWED}
            track = tracks[view.key] = self._tracks.get(view.key) or _Track(now)
            more = track.note(now)
            busy_s, tokens = more.get("busy_s", 0.0), more.get("step_tokens", 0.0) - more.get("step_rows", 0.0)
            prompts_s = _prompt_share(view, busy_s, tokens) * busy_s
            more |= {"busy_prompts_s": prompts_s, "busy_tokens_s": busy_s - prompts_s}
            for name, value in more.items():
                added[name] = added.get(name, 0.0) + value
        self._tracks = tracks
        running = sum(view.status.num_running for view in views)
        waiting = sum(view.status.num_waiting for view in views)
        self.samples.append(FleetSample(number, added, _shares(views), len(views), running, waiting))

    def shown(self, views: Iterable[NodeView]) -> list[dict[str, Any]]:
        """Each node as it is now, for JSON."""
        order = sorted(views, key=lambda view: (view.role, view.info.node_id))
        return [self._shown(view) for view in order]

    def _shown(self, view: NodeView) -> dict[str, Any]:
        said, info, track = view.status, view.info, self._tracks.get(view.key) or _Track({})
        prompt_tokens = max(0.0, track.rate("step_tokens") - track.rate("step_rows"))  # a stream's row has one token
        busy = min(1.0, track.rate("busy_s"))
        return {
            "id": info.node_id,
            "role": info.role,
            "leaning": view.leaning,
            "why": said.leaning.why,
            "state": "draining" if view.draining else "silent" if view.silent else "serving",
            "version": info.version,
            "address": info.control_address,
            "running": said.num_running,
            "waiting": said.num_waiting,
            "waiting_tokens": said.num_waiting_tokens,
            "kv_tokens": said.num_blocks * said.block_size,
            "shares": {name: round(value, 4) for name, value in _shares([view]).items()},
            "busy": round(busy, 3),
            "prompt_share": round(_prompt_share(view, busy, prompt_tokens), 3) if busy else None,
            "prompt_tokens_per_s": round(prompt_tokens, 1),
            "rows_per_s": round(track.rate("step_rows"), 1),
            "pushed_per_s": round(track.rate("kv_pushed_bytes")),
            "prefill_tokens_per_s": round(1 / said.prefill_s_per_token) if said.prefill_s_per_token else None,
        }


def _prompt_share(view: NodeView, busy_s: float, num_tokens: float) -> float:
    """The share of its busy time that a node worked for so many tokens of prompts: how it leans."""
    if view.role == "prefill" or not busy_s:
        return 1.0
    return min(1.0, max(0.0, num_tokens) * view.status.prefill_s_per_token / busy_s)


def _shares(views: Iterable[NodeView]) -> dict[str, float]:
    """How full pools and tiers are, weighed by their room in tokens."""
    room: dict[str, float] = {}
    taken: dict[str, float] = {}
    for view in views:
        said, counters = view.status, view.status.counters
        pairs: dict[str, tuple[float, float]] = {"pool": (said.num_blocks, said.num_blocks - said.num_free_blocks)}
        for tier in TIERS:
            pairs[tier] = counters.get(f"tier_{tier}_capacity", 0), counters.get(f"tier_{tier}_blocks", 0)
        for name, (most, used) in pairs.items():
            room[name] = room.get(name, 0.0) + most * said.block_size
            taken[name] = taken.get(name, 0.0) + used * said.block_size
    return {name: taken[name] / most for name, most in room.items() if most}
