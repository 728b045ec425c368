"""A prefill node's logic: prompts in, first tokens to the router, KV to a decode node. Sans-IO."""

from __future__ import annotations

from tandem.engine.scheduling.step_pace import next_prompt_decision_at
from tandem.node.serving import ServingNode


class PrefillNode(ServingNode):
    """Takes requests in mode "prefill" (hand the KV to `peer`) and "full" (e.g. one that its first token ends)."""

    @property
    def modes(self) -> frozenset[str]:
        return frozenset({"prefill", "full"})

    def launch_at(self) -> float:
        return next_prompt_decision_at(self.scheduler.state.clock)
