"""A prefill node's logic: prompts in, first tokens to the router, KV to a decode node. Sans-IO."""

from __future__ import annotations

from tandem.engine.scheduling.step_pace import next_prompt_decision_at
from tandem.node.requests import AcceptedRequest
from tandem.node.serving import ServingNode


class PrefillNode(ServingNode):
    """Takes requests in mode "prefill" (hand the KV to `peer`) and "full" (e.g. one that its first token ends)."""

    modes = frozenset({"prefill", "full"})

    def start(self, entry: AcceptedRequest, now: float) -> None:
        if entry.submit.mode == "prefill":
            peer = entry.submit.peer
            assert peer is not None, "a prefill node is told whom to hand over to"
            self.handoffs.source.expect(entry.request.key, peer, entry.request.num_prompt_tokens, entry.deadline)
            self.handoffs.connect(peer)
        super().start(entry, now)

    def launch_at(self) -> float:
        return next_prompt_decision_at(self.scheduler.state.clock)

    def stop(self, entry: AcceptedRequest, now: float) -> None:
        super().stop(entry, now)
        if entry.submit.mode == "prefill":
            self.handoffs.source.cancel(entry.request.key, now)
