"""What one router process says to itself and to the others of its group about its newest requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.operate import MAX_ASKED, TellStory
from tandem.router.placing.siblings import Seat
from tandem.router.recent.story import RequestStory
from tandem.router.requests.service import CompletionService
from tandem.router.watching.exchange import WorkerExchange
from tandem.router.watching.samples import RouterSample, RouterTotals, SampleLog
from tandem.router.watching.telling import told

STORY_S = 1.0  # how long nodes have to tell; a guess
MOST_RECENT, MOST_PROMPTS = 50, 16  # in one answer
MOST_SHOWN = 20  # of the newest requests, at each tick of the dashboard


class TickAnswer(msgspec.Struct, frozen=True):
    """What a process says for the dashboard: its samples since the last time, and its newest requests."""

    samples: list[RouterSample]
    recent: list[dict[str, Any]]


class RequestDesk:
    """Finds requests in all processes of this router, and has nodes tell what they did for them."""

    def __init__(self, service: CompletionService, seat: Seat | None) -> None:
        self.service = service
        self.num_processes = 1 if seat is None else seat.num_seats
        self.exchange = WorkerExchange(seat, self._answer)
        self._log = SampleLog()

    async def counts(self) -> dict[str, int]:
        """Prompts under way in all processes, and those of them without a node."""
        return _counted(await self.exchange.ask({"what": "counts"}))

    async def overview(self) -> dict[str, Any]:
        """What all processes show together: prompts under way and without a node, the slack of those that wait for a
        promised first token (the least, in seconds, and how many are late), and the newest requests."""
        parts = await self.exchange.ask({"what": "overview"})
        slacks = [part["least_slack_s"] for part in parts if part["least_slack_s"] is not None]
        return {
            **_counted(parts),
            "least_slack_s": min(slacks, default=None),
            "late": sum(part["late"] for part in parts),
            "recent": _newest(MOST_RECENT, [part["recent"] for part in parts]),
        }

    async def stories(self, name: str) -> list[dict[str, Any]]:
        """The stories of the prompts of the newest request of that name; none: no process remembers it."""
        found = [story for part in await self.exchange.ask({"what": "stories", "name": name}) for story in part]
        newest = max((story["at"] for story in found), default=0.0)
        own_name = next((story["names"][0] for story in found if story["at"] == newest), "")
        return [story for story in found if story["names"][0] == own_name]

    def note_tick(self, number: int, now: float) -> None:
        """Writes down what this process has counted since the tick before."""
        service = self.service
        totals = RouterTotals(*service.metrics.counted())
        self._log.take(number, totals, service.recent, service.num_waiting, now)

    async def ticks(self, since: int) -> tuple[list[list[RouterSample]], list[dict[str, Any]]]:
        """The samples after that tick of each process that answers, and the newest requests of all."""
        told = await self.exchange.ask({"what": "ticks", "since": str(since)})
        parts = [msgspec.convert(part, TickAnswer) for part in told]
        return [part.samples for part in parts], _newest(MOST_SHOWN, [part.recent for part in parts])

    async def _answer(self, question: dict[str, str]) -> Any:
        if question["what"] == "stories":
            found = self.service.recent.find(question["name"])[:MOST_PROMPTS]
            return await asyncio.gather(*(self.told(story) for story in found))
        service, now = self.service, time.monotonic()
        if question["what"] == "ticks":
            answer = TickAnswer(self._log.since(int(question["since"])), service.recent.newest(MOST_SHOWN, now))
            return msgspec.to_builtins(answer)
        counts = {"active": service.num_active, "waiting_for_node": service.num_waiting}
        if question["what"] == "counts":
            return counts
        slacks = service.recent.slacks(now)
        return {
            **counts,
            "least_slack_s": min(slacks, default=None),
            "late": sum(slack < 0 for slack in slacks),
            "recent": service.recent.newest(MOST_RECENT, now),
        }

    async def told(self, story: RequestStory) -> dict[str, Any]:
        """One story, with what nodes did: they are asked, and those that don't tell soon are named."""
        cluster, ask = self.service.cluster, secrets.token_hex(8)
        asked = {key: TellStory(ask=ask, request_ids=tuple(names)[:MAX_ASKED]) for key, names in story.asked.items()}

        def tell(key: NodeKey) -> bool:
            return cluster.send(key, asked[key], time.monotonic())

        answers = await cluster.stories.gather(list(asked), ask, tell, STORY_S) if asked else {}
        came = {key.node_id: answer for key, answer in answers.items() if answer is not None}
        return told(story, came, time.monotonic())


def _counted(parts: list[dict[str, Any]]) -> dict[str, int]:
    return {name: sum(part[name] for part in parts) for name in ("active", "waiting_for_node")}


def _newest(most: int, parts: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return sorted((each for part in parts for each in part), key=lambda each: -each["at"])[:most]
