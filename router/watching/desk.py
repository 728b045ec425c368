"""What one router process says to itself and to the others of its group about its newest requests."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.operate import MAX_ASKED, TellStory
from tandem.router.placing.siblings import Seat
from tandem.router.recent.story import RequestStory
from tandem.router.requests.service import CompletionService
from tandem.router.watching.exchange import WorkerExchange
from tandem.router.watching.telling import told

STORY_S = 1.0  # how long nodes have to tell; a guess
MOST_RECENT, MOST_PROMPTS = 50, 16  # in one answer
MOST_FLOWS = 128  # of a worker's: what the dashboard shows


class RequestDesk:
    """Finds requests in all processes of this router, and has nodes tell what they did for them."""

    def __init__(self, service: CompletionService, seat: Seat | None) -> None:
        self._service = service
        self.exchange = WorkerExchange(seat, self._answer)

    async def overview(self) -> dict[str, Any]:
        """All processes together: prompts under way and without a node, the slack of those that wait for a promised
        first token (the least, in seconds, and how many are late), how many prompts went from where to where, and the
        newest requests."""
        parts = await self.exchange.ask({"what": "overview"})
        slacks = [part["least_slack_s"] for part in parts if part["least_slack_s"] is not None]
        flows: dict[tuple[str, str], list[int]] = {}
        for part in parts:
            for source, sink, *counts in part["flows"]:
                before = flows.get((source, sink), [0, 0])
                flows[source, sink] = [a + b for a, b in zip(before, counts, strict=True)]
        recent = sorted((each for part in parts for each in part["recent"]), key=lambda each: -each["at"])
        return {
            "active": sum(part["active"] for part in parts),
            "waiting_for_node": sum(part["waiting_for_node"] for part in parts),
            "least_slack_s": min(slacks, default=None),
            "late": sum(part["late"] for part in parts),
            "flows": [[*pair, *counts] for pair, counts in flows.items()],
            "recent": recent[:MOST_RECENT],
        }

    async def stories(self, name: str) -> list[dict[str, Any]]:
        """The stories of the prompts of the newest request of that name; none: no process remembers it."""
        found = [story for part in await self.exchange.ask({"what": "stories", "name": name}) for story in part]
        newest = max((story["at"] for story in found), default=0.0)
        own_name = next((story["names"][0] for story in found if story["at"] == newest), "")
        return [story for story in found if story["names"][0] == own_name]

    async def _answer(self, question: dict[str, str]) -> Any:
        if question["what"] == "stories":
            found = self._service.recent.find(question["name"])[:MOST_PROMPTS]
            return await asyncio.gather(*(self.told(story) for story in found))
        service, now = self._service, time.monotonic()
        slacks = service.recent.slacks(now)
        flows = sorted(service.recent.flows.items(), key=lambda each: -each[1][1])[:MOST_FLOWS]
        return {
            "active": service.num_active,
            "waiting_for_node": service.num_waiting,
            "least_slack_s": min(slacks, default=None),
            "late": sum(slack < 0 for slack in slacks),
            "flows": [[*pair, *counts] for pair, counts in flows],
            "recent": service.recent.newest(MOST_RECENT, now),
        }

    async def told(self, story: RequestStory) -> dict[str, Any]:
        """One story, with what nodes did: they are asked, and those that don't tell soon are named."""
        cluster, ask = self._service.cluster, secrets.token_hex(8)
        asked = {key: TellStory(ask=ask, request_ids=tuple(names)[:MAX_ASKED]) for key, names in story.asked.items()}

        def tell(key: NodeKey) -> bool:
            return cluster.send(key, asked[key], time.monotonic())

        answers = await cluster.stories.gather(list(asked), ask, tell, STORY_S) if asked else {}
        came = {key.node_id: answer for key, answer in answers.items() if answer is not None}
        return told(story, came, time.monotonic())
