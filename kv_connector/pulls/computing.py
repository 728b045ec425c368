"""Computes beginnings of prompts for peers that ask for them, and hands them over layer by layer. Pure.

To the scheduler such a beginning is a prompt that will be handed over, to the source a hand-off like any other; its
first token is nobody's. A node that has anything else to do declines: the peer computes its prompt alone then.
"""

from __future__ import annotations

import numpy as np

from tandem.engine.contracts.hashing import HASH_BYTES, Secrecy
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.handoff import KVPull
from tandem.engine.contracts.wire.parts import Message, NodeInfo, PeerRef, PrefixWork
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.request import Prompt, Request
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import HandoffFailed, SourceOutcome
from tandem.kv_connector.pulls.answers import layout_problem, refusal
from tandem.kv_connector.pulls.puller import Puller
from tandem.kv_connector.source.manager import SourceManager

_UNTOLD = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)  # its first token does not end it


class PrefixComputer:
    """The beginnings that one node computes for others."""

    def __init__(self, info: NodeInfo, source: SourceManager, puller: Puller, state: SchedulerState) -> None:
        self._info, self._source, self._puller, self._state = info, source, puller, state
        self._requests: dict[AttemptKey, Request] = {}
        self._outbox: list[tuple[NodeKey, Message]] = []

    # --- events in ------------------------------------------------------------------------------------------

    def begin(self, sender: NodeKey, pull: KVPull, work: PrefixWork, takes_work: bool, now: float) -> None:
        """Takes a peer's question, with the prompt's beginning in it; idempotent. `takes_work` False declines."""
        if pull.source_epoch != self._info.epoch or pull.key in self._requests or self._source.knows(pull.key):
            return
        problem = outcomes.BUSY if not takes_work or self._is_busy else self._problem(sender, pull, work)
        if problem:
            self._refuse(sender, pull, problem)
            return
        prompt = Prompt(
            key=pull.key,
            token_ids=np.frombuffer(work.token_ids, "<i4").astype(np.int32),
            sampling=_UNTOLD,
            mode="prefill",
            secrecy=Secrecy(work.salt, work.num_public_tokens, work.context),
        )
        request = Request(prompt)  # whose hashes are made here, of its tokens
        request.get_help()
        self._requests[pull.key] = request
        peer = PeerRef(*sender, "")
        self._source.expect(pull.key, peer, request.num_prompt_tokens, now + pull.deadline_s, is_awaited=True)
        self._puller.want_computed(request, work.helpers)
        self._state.add(request)

    def on_outcome(self, outcome: SourceOutcome) -> bool:
        """Takes the end of a hand-off; False if that was no beginning's."""
        request = self._requests.pop(outcome.key, None)
        if request is not None and isinstance(outcome, HandoffFailed):
            self._state.abort(outcome.key)
        return request is not None

    def on_tick(self, now: float) -> None:
        """Forgets beginnings that ended here before they were handed over."""
        for key in [key for key in self._requests if not self._source.is_live(key)]:
            del self._requests[key]
            self._state.abort(key)

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    # --- inside ---------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return bool(self._state.queues.waiting or self._state.queues.running or self._state.connector is None)

    def _problem(self, sender: NodeKey, pull: KVPull, work: PrefixWork) -> str:
        """The reason why this beginning can't be computed here; "" when it can."""
        peer, size = self._source.peers.get(sender), self._state.block_size
        if problem := layout_problem(self._info.layout, None if peer is None else peer.layout):
            return problem
        num_tokens, rest = divmod(len(work.token_ids), 4)
        num_hashes, odd = divmod(len(pull.block_hashes), HASH_BYTES)
        if rest or odd or num_tokens != num_hashes * size or not pull.first_block < num_hashes:
            return outcomes.UNKNOWN
        token_ids = np.frombuffer(work.token_ids, "<i4")
        if token_ids.min() < 0 or token_ids.max() >= self._info.vocab_size or num_tokens >= self._info.max_model_len:
            return outcomes.UNKNOWN
        return "" if num_hashes < self._state.pool.num_free else outcomes.BUSY

    def _refuse(self, sender: NodeKey, pull: KVPull, reason: str) -> None:
        self._outbox.append((sender, refusal(pull, self._info.epoch, reason)))
