"""Scheduler half of a connector that parks prompts and keeps finished blocks for as long as a test wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.step import SchedulerOutput
from tandem.kv_connector.protocol.jobs import StepMoves


class FakeConnector:
    """`parked` names requests that must wait; `keeps` False: blocks go back to the scheduler at once."""

    def __init__(self, pool: BlockPool, keeps: bool = True) -> None:
        self.parked: set[str] = set()
        self.granted: set[str] = set()
        self.keeps = keeps
        self.num_external_tokens: dict[str, int] = {}
        self.held: dict[str, tuple[list[int], int]] = {}
        self.asked: list[str] = []
        self.allocated: dict[str, list[int]] = {}
        self.finished: list[str] = []
        self.metas: list[int] = []
        self._pool = pool

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        assert request.state is not RequestState.RUNNING
        self.asked.append(request.key.request_id)
        if request.key.request_id in self.parked:
            return None
        return self.num_external_tokens.get(request.key.request_id, 0)

    def is_granted(self, request: Request) -> bool:
        return request.key.request_id in self.granted

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external_tokens: int) -> None:
        assert request.slot >= 0
        self.allocated[request.key.request_id] = list(block_ids)

    def build_connector_meta(self, output: SchedulerOutput) -> StepMoves:
        self.metas.append(output.step_id)
        return StepMoves(output.step_id, (), ())

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        assert request.key.request_id not in self.finished, "a request left twice"
        self.finished.append(request.key.request_id)
        if not self.keeps:
            return False
        self.held[request.key.request_id] = list(block_ids), request.last_step
        return True

    def release(self, name: str) -> None:
        self._pool.free(*self.held.pop(name))

    @property
    def references(self) -> Counter[int]:
        return Counter(block_id for block_ids, _ in self.held.values() for block_id in block_ids)
