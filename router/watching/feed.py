"""The dashboard's feed: at each tick one event, made and encoded once for all who look (docs/dashboard.md)."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from tandem.engine.contracts.errors import UnavailableError
from tandem.engine.process.version import version
from tandem.router.watching.desk import RequestDesk
from tandem.router.watching.fleet import FleetLog, FleetSample
from tandem.router.watching.points import SERIES, Point, PointMaker
from tandem.router.watching.samples import KEPT_TICKS, MOST_FLOWS, TICK_S, RouterSample, merged

MOST_VIEWERS = 16  # of a router process; a guess: a team's screens. Each costs what one event is long, a tick
MOST_UNREAD = 5  # events that wait for a viewer; one that has more is let go of; a guess
FLOW_TICKS = 10  # over which flows are averaged; a guess
AFTER_S = 0.01  # a guess: timers may wake a millisecond too soon, in the tick before
BREATH = 50  # ticks of the past that are made without giving way; a guess: some milliseconds

TimedPoint = tuple[int, Point]  # with the number of its tick


class Viewer:
    """Somebody who looks. `drop` closes the connection of one that does not read."""

    def __init__(self, drop: Callable[[], None]) -> None:
        self._drop = drop
        self._events: asyncio.Queue[bytes] = asyncio.Queue(MOST_UNREAD + 1)  # and b"" for the end

    def tell(self, event: bytes) -> bool:
        """Queues an event. Returns False when too much is unread: the viewer has been dropped then."""
        if self._events.qsize() >= MOST_UNREAD:
            self.end()
            self._drop()
            return False
        self._events.put_nowait(event)
        return True

    def end(self) -> None:
        if not self._events.full():
            self._events.put_nowait(b"")

    async def events(self) -> AsyncIterator[bytes]:
        while event := await self._events.get():
            yield event


class DashboardFeed:
    """One router process's feed. `run` writes every tick down, and tells whoever looks."""

    def __init__(self, desk: RequestDesk) -> None:
        self.desk, self._cluster = desk, desk.service.cluster
        self._fleet = FleetLog()
        self.viewers: list[Viewer] = []
        self._is_closed = False
        self._forget()

    def _forget(self) -> None:
        """Drops what is there for viewers alone."""
        self._maker, self._last = PointMaker(), -1
        self._points: deque[TimedPoint] = deque(maxlen=KEPT_TICKS)
        self._routers: deque[RouterSample] = deque(maxlen=FLOW_TICKS)

    async def run(self) -> None:
        """Writes ticks down until it is cancelled."""
        while True:
            now = time.monotonic()
            number = int(now / TICK_S)
            self.desk.note_tick(number, now)
            self._fleet.take(number, self._cluster.views)
            if self.viewers:
                await self._tell_all(number)
            await asyncio.sleep(TICK_S - time.monotonic() % TICK_S + AFTER_S)

    def join(self, drop: Callable[[], None]) -> Viewer:
        """Somebody who gets all ticks that are kept, and then each. Raises UnavailableError when enough others look."""
        if self._is_closed:
            raise UnavailableError("the router is shutting down")
        if len(self.viewers) >= MOST_VIEWERS:
            raise UnavailableError(f"{MOST_VIEWERS} dashboards are open at this router process: close one")
        viewer = Viewer(drop)
        if self._points:
            viewer.tell(self._past())
        self.viewers.append(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        if viewer in self.viewers:
            self.viewers.remove(viewer)
        if not self.viewers:
            self._forget()

    def close(self) -> None:
        """Ends all streams: they would hold up the end of the process."""
        self._is_closed = True
        for viewer in self.viewers:
            viewer.end()

    async def _tell_all(self, number: int) -> None:
        is_first, before = not self._points, self._last
        answers, recent = await self.desk.ticks(self._last if self._points else number - KEPT_TICKS)
        # The newest tick is told with the next: by then every process has written it down.
        await self._make_points(answers, number - 1)
        if not self._points:
            return
        new = [timed for timed in self._points if timed[0] > before][-BREATH:]
        event = self._past() + self._now(len(answers), recent, []) if is_first else self._now(len(answers), recent, new)
        self.viewers = [viewer for viewer in self.viewers if viewer.tell(event)]
        if not self.viewers:
            self._forget()

    async def _make_points(self, answers: list[list[RouterSample]], until: int) -> None:
        by_tick: dict[int, list[RouterSample]] = {}
        for samples in answers:
            for sample in samples:
                by_tick.setdefault(sample.number, []).append(sample)
        made = 0
        for fleet in list(self._fleet.samples):
            if self._last < fleet.number <= until:
                self._make_point(fleet, by_tick.get(fleet.number, []))
                made += 1
                if made % BREATH == 0:
                    await asyncio.sleep(0)

    def _make_point(self, fleet: FleetSample, samples: list[RouterSample]) -> None:
        router = merged(fleet.number, samples)
        self._routers.append(router)
        self._points.append((fleet.number, self._maker.point(router, fleet)))
        self._last = fleet.number

    # --- what is told -------------------------------------------------------------------------------------------

    def _past(self) -> bytes:
        """What somebody gets first: all ticks, in columns, and what doesn't change."""
        facts = self._cluster.model.facts
        return _event("past", {
            "version": version(),
            "model": None if facts is None else facts.name,
            "tick_s": TICK_S,
            "kept_ticks": KEPT_TICKS,
            "processes": self.desk.num_processes,
            "at": [round(_clock(number), 1) for number, _ in self._points],
            "series": {name: [point[name] for _, point in self._points] for name in SERIES},
        })  # fmt: skip

    def _now(self, num_answers: int, recent: list[dict[str, Any]], new: list[TimedPoint]) -> bytes:
        """The newest points, the nodes as they are, what flows between them, and the newest requests."""
        need = {name: round(value, 3) for name, value in self._cluster.need.figures().items()}
        return _event("now", {
            "points": [[round(_clock(number), 1), point] for number, point in new],
            "answering": num_answers,
            "ready": self._cluster.ready,
            "missing": None if self._cluster.ready else self._cluster.missing(),
            "fleet": need,
            "nodes": self._fleet.shown(self._cluster.views),
            "flows": self._flows(),
            "recent": recent,
        })  # fmt: skip

    def _flows(self) -> list[list[Any]]:
        """Rows [node that computes, node that decodes, prompts a second, their tokens a second], the widest flows
        first."""
        sums: dict[tuple[str, str], list[int]] = {}
        for router in self._routers:
            for source, sink, prompts, tokens in router.flows:
                found = sums.setdefault((source, sink), [0, 0])
                found[0], found[1] = found[0] + prompts, found[1] + tokens
        most = sorted(sums.items(), key=lambda flow: -flow[1][1])[:MOST_FLOWS]
        seconds = FLOW_TICKS * TICK_S
        return [[*pair, *(round(count / seconds, 2) for count in counts)] for pair, counts in most]


def _event(name: str, value: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def _clock(number: int) -> float:
    """Unix time of a tick."""
    return time.time() - time.monotonic() + number * TICK_S
