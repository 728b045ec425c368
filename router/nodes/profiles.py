"""Profiles that somebody waits for: which node is to answer what was asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.profile import Profiled


class ProfileAnswers:
    """The answers that are awaited on this event loop, by node and by what was asked."""

    def __init__(self) -> None:
        self._awaited: dict[tuple[NodeKey, str], asyncio.Future[Profiled]] = {}

    async def gather(
        self, nodes: Sequence[NodeKey], ask: str, send: Callable[[NodeKey], bool], wait_s: float
    ) -> list[Profiled]:
        """Has `send` ask each node. Returns their answers, in order; who can't be asked, is lost or says nothing for
        `wait_s` seconds has an `error`."""
        futures = [asyncio.get_running_loop().create_future() for _ in nodes]
        self._awaited |= {(node, ask): future for node, future in zip(nodes, futures, strict=True)}
        try:
            for node in nodes:
                if not send(node):
                    self.lost(node, "it is not connected")
            await asyncio.wait(futures, timeout=wait_s)
        finally:
            for node in nodes:
                self._awaited.pop((node, ask), None)
        silent = Profiled(ask=ask, error=f"no answer within {wait_s:g} s")
        return [future.result() if future.done() else silent for future in futures]

    def answered(self, node: NodeKey, answer: Profiled) -> None:
        future = self._awaited.pop((node, answer.ask), None)
        if future is not None:
            future.set_result(answer)

    def lost(self, node: NodeKey, reason: str) -> None:
        for key, ask in list(self._awaited):
            if key == node:
                self.answered(node, Profiled(ask=ask, error=f"the node is lost: {reason}"))
