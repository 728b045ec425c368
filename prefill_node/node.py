"""A prefill node's logic: prompts in, first tokens to the router, KV to a decode node. Sans-IO."""

from __future__ import annotations

from tandem.engine.block_pool import BlockPool
from tandem.engine.messages import Message, NodeInfo, PeerRef
from tandem.engine.request_book import Entry, RequestBook
from tandem.engine.scheduler import Scheduler
from tandem.engine.serving_node import ServingNode
from tandem.kv_connector.meta import TransferJob, TransportCommand
from tandem.kv_connector.outcomes import HandoffCompleted, HandoffFailed, failure_code
from tandem.kv_connector.peer_effects import PeerEffect
from tandem.kv_connector.source import SourceManager


class PrefillNode(ServingNode):
    """Takes "prefill" (hand the KV to `peer`) and "full" (a request that its first token ends, say)."""

    modes = frozenset({"prefill", "full"})

    def __init__(
        self,
        info: NodeInfo,
        book: RequestBook,
        scheduler: Scheduler,
        pool: BlockPool,
        max_queue: int,
        source: SourceManager,
    ) -> None:
        super().__init__(info, book, scheduler, pool, max_queue)
        self.source = source

    def start(self, entry: Entry, now: float) -> None:
        if entry.submit.mode == "prefill":
            peer = entry.submit.peer
            if peer is None:
                self.book.fail(entry.request.key, "invalid_request", "mode prefill needs a peer", retryable=False)
                return
            self.source.expect(
                entry.request.request_id,
                entry.request.attempt,
                peer,
                entry.request.num_prompt_tokens,
                entry.deadline,
            )
            self._connects.append(peer)
        self.scheduler.add(entry.request)
        self.book.accept(entry)

    def stop(self, entry: Entry, now: float) -> None:
        self.scheduler.abort(entry.request.request_id, entry.request.attempt)
        if entry.submit.mode == "prefill":
            self.source.cancel(entry.request.request_id, entry.request.attempt, now)

    def on_peer_message(self, peer_id: str, message: Message, now: float) -> None:
        self.source.on_message(peer_id, message, now)
        self._take_outcomes(now)

    def on_peer_up(self, peer_id: str, info: NodeInfo, now: float) -> None:
        self.source.peer_connected(info)
        self._take_outcomes(now)

    def on_peer_lost(self, peer_id: str, info: NodeInfo, reason: str, now: float) -> None:
        self.source.peer_lost(info.node_id, info.epoch)
        self._take_outcomes(now)

    def on_peer_refused(self, ref: PeerRef, reason: str, now: float) -> None:
        self.source.peer_lost(ref.node_id, ref.epoch, f"the sink is refused: {reason}")
        self._take_outcomes(now)

    def on_transfer(self, event: object, now: float) -> None:
        self.source.on_transfer_event(event, now)
        self._take_outcomes(now)

    def on_tick(self, now: float) -> None:
        self.source.on_tick(now)  # first: a deadline that passes is told to the peer as such, not as a cancel
        self._take_outcomes(now)
        super().on_tick(now)

    def drain_jobs(self) -> list[TransferJob]:
        return self.source.drain_jobs()

    def drain_peer_effects(self) -> list[PeerEffect]:
        return self.source.drain_peer_effects()

    def drain_transport_commands(self) -> list[TransportCommand]:
        return self.source.drain_transport_commands()

    def handoff_outbox(self) -> list[tuple[str, Message]]:
        return self.source.drain_outbox()

    def handoff_counters(self) -> dict[str, float]:
        return self.source.counters.as_dict()

    @property
    def handoff_idle(self) -> bool:
        return self.source.is_idle

    def check_integrity(self) -> None:
        super().check_integrity()
        self.source.check_integrity()

    def _take_outcomes(self, now: float) -> None:
        for outcome in self.source.drain_events():
            if isinstance(outcome, HandoffCompleted):
                self.book.handed_off(outcome.key)
            elif isinstance(outcome, HandoffFailed):
                text = f"the hand-off failed: {outcome.reason}"
                entry = self.book.fail(outcome.key, failure_code(outcome.reason), text, outcome.retryable)
                if entry is not None:
                    self.stop(entry, now)
