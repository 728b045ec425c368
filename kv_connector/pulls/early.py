"""Requests that begin while a peer still computes what comes before: their first step waits, layer by layer. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol.jobs import ArrivingKV
from tandem.kv_connector.pulls.record import Pull, PullStage
from tandem.kv_connector.sink.manager import SinkManager


class EarlyStarts:
    """The requests of one node that begin early, and those of them whose beginning then did not come as it should."""

    def __init__(self, sink: SinkManager) -> None:
        self._sink = sink
        self._beginning: list[tuple[Pull, int]] = []  # with the step that is being built, and their grants
        self._disproved: list[Request] = []

    @staticmethod
    def may_begin(pull: Pull, hits: Sequence[int], runs_alone: bool) -> bool:
        """Whether the request may begin now: not beside others, whom its waits would hold up."""
        return pull.has_begun and runs_alone and len(hits) == pull.first

    def begin(self, pull: Pull, block_ids: Sequence[int]) -> bool:
        """Has a pull's request begin with the step that is being built, in the blocks that are written for it. False:
        these are other blocks."""
        grant = self._sink.grant_of(pull.key)
        if grant is None or tuple(block_ids) != grant.block_ids:
            return False
        pull.stage = PullStage.EARLY
        pull.request.doubt()
        self._beginning.append((pull, grant.grant_id))
        return True

    def take_arriving(self) -> tuple[ArrivingKV, ...]:
        """What the step that has been built waits for."""
        beginning, self._beginning = self._beginning, []
        return tuple(ArrivingKV(grant_id, pull.request.slot, pull.deadline) for pull, grant_id in beginning)

    def disprove(self, request: Request) -> None:
        self._disproved.append(request)

    def drain_disproved(self) -> list[Request]:
        """The requests that must fail, since what they have computed is behind KV that did not come, or came wrong."""
        disproved, self._disproved = self._disproved, []
        return disproved
