"""Takes shares of prompts that other nodes have. Pure.

To the scheduler a share is a prompt that ends with this node's last chunk; its first token is nobody's. It gets all its
blocks at once or is declined: the peer computes its prompt alone then. What they push out of the pool is saved first
(docs/tiers.md#way-is-made-first), so that an answer may take a moment, in which the peer computes its first chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tandem.engine.contracts.hashing import Secrecy
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.handoff import KVPull
from tandem.engine.contracts.wire.parts import Message, NodeInfo, SharedWork
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.planner import is_decoding
from tandem.engine.scheduling.prompt_order import SlackOrder
from tandem.engine.scheduling.request import Prompt, Request
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.pulls.answers import layout_problem, refusal
from tandem.kv_connector.pulls.chunks import ChunkTable
from tandem.kv_connector.pulls.shares import SharedPrompts
from tandem.kv_connector.source.manager import SourceManager

_UNTOLD = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)  # its first token does not end it


@dataclass(eq=False, slots=True)
class AskedShare:
    """A peer's question that is not answered yet. Toward this node's tiers it is a taker."""

    sender: NodeKey
    pull: KVPull
    work: SharedWork
    num_blocks: int
    deadline: float  # of the share


class PromptHelper:
    """Answers peers that ask for help with a prompt."""

    def __init__(self, info: NodeInfo, source: SourceManager, shares: SharedPrompts, state: SchedulerState) -> None:
        self._info, self._source, self._shares, self._state = info, source, shares, state
        self._outbox: list[tuple[NodeKey, Message]] = []
        self._asked: dict[AttemptKey, AskedShare] = {}

    def begin(self, sender: NodeKey, pull: KVPull, work: SharedWork, takes_work: bool, now: float) -> None:
        """Takes a peer's question; idempotent. `takes_work` False declines."""
        if pull.source_epoch != self._info.epoch or self._source.knows(pull.key) or pull.key in self._asked:
            return
        if problem := self._problem(sender, pull, work):
            self._outbox.append((sender, refusal(pull, self._info.epoch, problem)))
            return
        num_blocks = len(work.token_ids) // 4 // self._state.block_size
        asked = self._asked[pull.key] = AskedShare(sender, pull, work, num_blocks, now + pull.deadline_s)
        self._answer(asked, takes_work)

    def on_tick(self, takes_work: bool) -> None:
        """Answers questions that can be answered by now."""
        for asked in list(self._asked.values()):
            self._answer(asked, takes_work)

    @property
    def is_idle(self) -> bool:
        """Whether no question waits for its answer."""
        return not self._asked

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    def _answer(self, asked: AskedShare, takes_work: bool) -> None:
        """Begins a share or declines it, once what its blocks push out is saved."""
        is_lost = self._source.peers.get(asked.sender) is None
        is_able = takes_work and not (is_lost or self._is_busy)
        has_room = self._state.pool.cost(asked.num_blocks) <= self._state.pool.num_grantable
        tiers = self._state.tiers
        if is_able and has_room and tiers.prepare(asked, (), (), False, asked.num_blocks) is None:
            return
        del self._asked[asked.pull.key]
        if not (is_able and has_room and self._add(asked)) and not is_lost:
            self._outbox.append((asked.sender, refusal(asked.pull, self._info.epoch, outcomes.BUSY)))
        tiers.ended(asked)

    @property
    def _is_busy(self) -> bool:
        """Whether it lacks a slot for a share, or has prompts and no deadlines to order a share by among them."""
        queues = self._state.queues
        num_shares = sum(bool(each.block_ids) for each in queues.waiting)
        if num_shares >= len(queues.free_slots):
            return True
        if isinstance(self._state.prompt_order, SlackOrder):
            return False
        return bool(queues.waiting) or not all(map(is_decoding, queues.running))

    def _problem(self, sender: NodeKey, pull: KVPull, work: SharedWork) -> str:
        """The reason why this share can't be computed here; "" when it can."""
        peer = self._source.peers.get(sender)
        if problem := layout_problem(self._info.layout, None if peer is None else peer.layout):
            return problem
        if self._info.group_size > 1:  # its steps would wait for a peer, and others' for them
            return outcomes.UNKNOWN
        table, nodes, place = ChunkTable(work.ends, len(work.nodes)), work.nodes, work.place
        if not table.makes_sense(self._state.block_size) or not 0 < place < len(nodes) or self._state.connector is None:
            return outcomes.UNKNOWN
        if len({each.node_id for each in nodes}) < len(nodes) or nodes[place].key != self._info.key:
            return outcomes.UNKNOWN
        if nodes[0].key != sender or pull.key != (f"{work.name}/{place}/0", pull.attempt):
            return outcomes.UNKNOWN
        num_tokens, rest = divmod(len(work.token_ids), 4)
        if rest or num_tokens != table.ends[table.of(place)[-1]] or num_tokens >= self._info.max_model_len:
            return outcomes.UNKNOWN
        token_ids = np.frombuffer(work.token_ids, "<i4")
        in_vocabulary = token_ids.min() >= 0 and token_ids.max() < self._info.vocab_size
        return "" if in_vocabulary else outcomes.UNKNOWN

    def _add(self, asked: AskedShare) -> bool:
        """Begins a share; False if there is no room for it now."""
        pull, work = asked.pull, asked.work
        prompt = Prompt(
            key=AttemptKey(work.name, pull.attempt),
            token_ids=np.frombuffer(work.token_ids, "<i4").astype(np.int32),
            sampling=_UNTOLD,
            priority=work.priority,
            targets=work.targets,
            waited_s=work.waited_s,
            mode="prefill",
            secrecy=Secrecy(work.salt, work.num_public_tokens, work.context),
        )
        request = Request(prompt)
        request.help(len(work.nodes))
        blocks = self._state.pool.allocate_grantable(asked.num_blocks)
        if blocks is None or not self._state.add_share(request, blocks):
            return False
        self._shares.join(work, request, pull.attempt, asked.deadline)
        return True
