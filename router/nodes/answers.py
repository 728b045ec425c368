"""What several nodes are asked at once, while somebody waits until each has answered. On the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from tandem.engine.contracts.keys import NodeKey

Answer = TypeVar("Answer")


class NodeAnswers(Generic[Answer]):
    """The answers that are awaited, by node and by question; None: no answer will come."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[NodeKey, Hashable], asyncio.Future[Answer | None]] = {}

    async def gather(
        self, nodes: Sequence[NodeKey], question: Hashable, ask: Callable[[NodeKey], bool], within_s: float
    ) -> dict[NodeKey, Answer | None]:
        """Has `ask` send the question to each node, False where it can't, and returns their answers: None of a node
        that is lost meanwhile or can't be asked, and nothing of one that is silent for `within_s` seconds."""
        futures = {node: asyncio.get_running_loop().create_future() for node in nodes}
        self._awaited |= {(node, question): future for node, future in futures.items()}
        try:
            for node in nodes:
                if not ask(node):
                    self.settle(node, question, None)
            await asyncio.wait(futures.values(), timeout=within_s)
        finally:
            for node in nodes:
                self._awaited.pop((node, question), None)
        return {node: future.result() for node, future in futures.items() if future.done()}

    def lost(self, node: NodeKey) -> None:
        for key, question in list(self._awaited):
            if key == node:
                self.settle(node, question, None)

    def settle(self, node: NodeKey, question: Hashable, answer: Answer | None) -> bool:
        """Takes an answer. Returns whether somebody waited for it."""
        future = self._awaited.pop((node, question), None)
        if future is not None:
            future.set_result(answer)
        return future is not None
