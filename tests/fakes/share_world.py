"""Nodes that compute prompts together: the logic, scheduler, managers and pool of real ones. Devices, transfer threads
and network in short.

A block's content is the hash of its tokens if it was computed behind right blocks, else garbage; so is the token behind
a prompt. Where layers slide its window blocks have contents of their own, of which those in the window must be right.
Writes land whether their grant is open or not, as one-sided transports do. A step runs when all that it waits for has
come, or does not come any more.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions, Timeouts
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVGrant, KVLayers, KVReady, KVRelease
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.engine.contracts.wire.requests import Cancel, RequestFailed, Submit, Tokens
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.ports import NoTiers
from tandem.engine.scheduling.prompt_order import SlackOrder
from tandem.engine.scheduling.request import Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.scheduling.step import RunnerOutput, ScheduledRow, SchedulerOutput
from tandem.kv_connector.protocol.effects import Send
from tandem.kv_connector.protocol.jobs import (
    BlockPush,
    CloseGrant,
    Finalize,
    OpenGrant,
    ReadySent,
    Retire,
    Retired,
    StepMoves,
    Verified,
    Verify,
)
from tandem.kv_connector.protocol.peer_effects import Fenced, FenceSource
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone, Load, Save
from tandem.kv_connector.tiers.manager import TierManager
from tandem.node.control.events import PeerLost, PeerUp, Received
from tandem.node.handoffs import Handoffs
from tandem.node.requests import RequestBook
from tandem.node.serving import ServingNode
from tandem.node.tiers import take_copied

BLOCK, CHUNK = 4, 8
LAYOUT = KVLayout((KVGroup(1, 1, 1, "float32"),), BLOCK)
TIMES = Timeouts(resend_s=0.5, connect_s=3.0)
ROUTER = NodeKey("router", 1)
RIGHT, WRONG = 1, 2  # tokens
GARBAGE, UNNAMED = b"?" * 16, b"!" * 16  # UNNAMED: right, of tokens that the host does not know yet
SHORT_WINDOW, LONG_WINDOW = BlockWindow(BLOCK + 1, BLOCK, 2), BlockWindow(CHUNK + BLOCK, BLOCK, 1)  # than a chunk


def beside(name: bytes, place: int) -> bytes:
    """The content of a window block of the block with this content."""
    return bytes([place]) + name[1:]


@dataclass
class Landing:
    """A grant, as the pool sees it that it is for."""

    grant: KVGrant
    written: set[int] = field(default_factory=set)
    is_over: bool = False

    @property
    def has_come(self) -> bool:
        return self.written == set(self.grant.block_ids)


class ShareNode:
    """One node, and its device."""

    def __init__(
        self, name: str, num_blocks: int, clock: StepClock, has_deadlines: bool, num_host: int, window: BlockWindow
    ) -> None:
        scheduling = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, max_prefill_chunk=CHUNK)
        options = NodeOptions("unified", ModelOptions("m"), CacheOptions(BLOCK, BLOCK), scheduling, timeouts=TIMES)
        self.info = NodeInfo(
            node_id=name, epoch=ord(name), role="unified", layout=LAYOUT, vocab_size=100, max_model_len=200
        )
        num_blocks *= 1 + window.num_each
        self.pool = BlockPool(num_blocks, enable_caching=True, window=window)
        keys = ClusterKeys(b"k" * 16, False)
        self.tiers = None
        if num_host:
            self.tiers = TierManager(self.pool, BLOCK, TierIndex(num_host), None, None, Rate(), 2, clock=clock.now)
        self.host: list[tuple[bytes, ...]] = [(GARBAGE,)] * num_host
        self.copies: deque[Save | Load] = deque()
        self.handoffs = Handoffs(self.info, keys, self.pool, options, self.tiers or NoTiers(), Rate())
        state = SchedulerState(
            scheduling, self.pool, block_size=BLOCK, max_model_len=200, eos_token_ids=[],
            root_for_salt=lambda salt: root_hash(b"model", salt), connector=self.handoffs.source.prompts,
            tiers=self.handoffs.puller, shares=self.handoffs.shares, clock=clock,
            prompt_order=SlackOrder(30.0, clock) if has_deadlines else None,
        )  # fmt: skip
        self.scheduler = Scheduler(state)
        self.logic = ServingNode(self.info, RequestBook(100, 200), self.scheduler, self.pool, 9, self.handoffs)
        self.content = [GARBAGE] * (num_blocks + 1)  # with the null block's
        # With the blocks of its rows, by block table.
        self.steps: deque[tuple[SchedulerOutput, list[tuple[tuple[int, ...], ...]]]] = deque()
        self.jobs: deque[Any] = deque()
        self.landing: dict[int, Landing] = {}
        self.retired: set[int] = set()

    @property
    def ref(self) -> PeerRef:
        return PeerRef(self.info.node_id, self.info.epoch, "")

    def look_at_tiers(self) -> None:
        """What the shell does after a turn."""
        if self.tiers is not None:
            self.tiers.on_turn(self.pool.drain_events(), is_idle=False)
            self.copies += self.tiers.drain_jobs()

    def copy(self) -> None:
        """The next job of the tiers' threads."""
        job = self.copies.popleft()
        for slot, block_id, window_ids in zip(job.host_slots, job.block_ids, job.window_ids, strict=True):
            if isinstance(job, Save):
                self.host[slot] = tuple(self.content[each] for each in (block_id, *window_ids))
            else:
                for each, content in zip((block_id, *window_ids), self.host[slot], strict=False):
                    self.content[each] = content
        assert self.tiers is not None
        take_copied(self.tiers, self.logic, JobDone(job, 0.001))

    def has(self, block_hash: bytes) -> bool:
        """Whether it has the block, in its pool or below."""
        return self.pool.find(block_hash) is not None or (self.tiers is not None and self.tiers.is_on_host(block_hash))

    def check(self) -> None:
        self.logic.check_integrity()
        for block_id, content in enumerate(self.content):
            found = self.pool.block_hash(block_id)
            if found is not None and self.pool.is_published(found):
                assert content in (found, UNNAMED), f"{self.info.node_id}: block {block_id} holds another's bytes"
                for place, each in enumerate(self.pool.windows.of(block_id)):
                    right = beside(found, place), beside(UNNAMED, place)
                    assert self.content[each] in right, f"{self.info.node_id}: block {each} holds another's bytes"
        index = None if self.tiers is None else self.tiers._host
        for found in () if index is None else index.unpinned_hashes():
            assert self.host[index.slot(found)][0] in (found, UNNAMED), f"{self.info.node_id}: {found!r} is another's"

    def tables_of(self, request: Request) -> tuple[tuple[int, ...], ...]:
        return tuple(request.block_ids), *self.scheduler.state.kv.window_ids(request)

    def compute(self, row: ScheduledRow, request: Request, tables: Sequence[Sequence[int]]) -> bool:
        """Writes a row's full blocks. Returns whether those that it sees before it hold what they should."""
        self.scheduler.state.kv.extend_hashes(request)
        first, end = row.start // BLOCK, (row.start + row.num_tokens) // BLOCK
        names = [*request.block_hashes, *[UNNAMED] * end]
        (block_ids, *windows), passed = tables, self.pool.window.num_passed(row.start)
        is_right = all(self.content[block_ids[i]] in (names[i], UNNAMED) for i in range(first))
        for place, window_ids in enumerate(windows):
            seen = [(self.content[window_ids[i]], names[i]) for i in range(passed, first)]
            is_right &= all(found in (beside(name, place), beside(UNNAMED, place)) for found, name in seen)
        for i in range(first, min(end, len(block_ids))):
            self.content[block_ids[i]] = names[i] if is_right else GARBAGE
            for place, window_ids in enumerate(windows):
                self.content[window_ids[i]] = beside(names[i], place) if is_right else GARBAGE
        return is_right


class ShareWorld:
    """`post` is what has been sent and not arrived; nothing happens by itself. `told`: what the router heard."""

    def __init__(
        self, *num_blocks: int, has_deadlines: bool = False, num_host: int = 0, window: BlockWindow = NO_WINDOW
    ) -> None:
        """`num_blocks` are without window blocks; `num_host`: blocks that each node's host memory has room for."""
        self.now = 1.0
        clocks = [StepClock(lambda: self.now) for _ in num_blocks]
        each_has = zip("abc", num_blocks, clocks, strict=False)
        self.nodes = [ShareNode(*each, has_deadlines, num_host, window) for each in each_has]
        self.post: deque[tuple[ShareNode, ShareNode, Any]] = deque()
        self.told: list[Tokens | RequestFailed] = []
        self._num_told: Counter[tuple[str, int, int]] = Counter()  # tokens
        self.corrupts = False  # the next push
        self.is_checked = True  # after whatever happens
        self.copies_stand = False  # no copy to or from host memory comes to its end
        for one in self.nodes:
            for other in self.nodes:
                if one is not other:
                    self._greet(one, other)

    # --- what may happen ------------------------------------------------------------------------------------

    def submit(
        self, name: str, num_tokens: int, on: int, helpers: Sequence[int] = (), max_tokens: int = 2, first: int = 0
    ) -> None:
        """Prompts of another `first` token are others from the beginning."""
        tokens = np.arange(first, first + num_tokens, dtype="<i4") % 90 + 3
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refs = tuple(self.nodes[index].ref for index in helpers)
        submit = Submit(
            request_id=name, attempt=0, mode="full", prompt_token_ids=tokens.tobytes(), sampling=sampling,
            helpers=refs, deadline_s=100.0,
        )  # fmt: skip
        self.nodes[on].logic.on_control(Received(ROUTER, submit), self.now)
        self._settle()

    def cancel(self, name: str, on: int) -> None:
        self.nodes[on].logic.on_control(Received(ROUTER, Cancel(request_id=name, attempt=0)), self.now)
        self._settle()

    def moves(self) -> list[tuple[str, ShareNode]]:
        """What could happen next, in an order in which each has its turn."""
        found = [("deliver", self.post[0][1])] if self.post else []
        for node in self.nodes:
            found += [("transfer", node)] if node.jobs else []
            found += [("copy", node)] if node.copies and not self.copies_stand else []
            found += [("finish", node)] if node.steps and self._may_finish(node) else []
        return found or [("launch", node) for node in self.nodes]

    def do(self, move: tuple[str, ShareNode]) -> bool:
        """Returns whether anything happened."""
        kind, node = move
        if kind == "launch":
            return self._launch(node)
        if kind == "finish":
            self._finish(node)
        elif kind == "transfer":
            self._transfer(node)
        elif kind == "copy":
            node.copy()
            self._settle()
        else:
            self.deliver()
        return True

    def deliver(self, is_lost: bool = False) -> None:
        sender, to, message = self.post.popleft()
        if not is_lost:
            if isinstance(message, KVRelease):
                for landing in to.landing.values():
                    landing.is_over |= landing.grant.key == message.key
            to.logic.on_control(Received(sender.info.key, message), self.now)
        self._settle()

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes:
            node.logic.on_tick(self.now)
        self._settle()

    def lose_each_other(self, one: ShareNode, other: ShareNode) -> None:
        """As both do after silence, and when they are greeted again. Nothing more that was written lands."""
        self.post = deque(letter for letter in self.post if {letter[0], letter[1]} != {one, other})
        for me, peer in ((one, other), (other, one)):
            for landing in me.landing.values():
                landing.is_over |= landing.grant.source == peer.info.key
            peer.jobs = deque(
                job for job in peer.jobs if not isinstance(job, BlockPush) or job.grant.sink != me.info.key
            )
            me.logic.on_control(PeerLost(peer.info, False), self.now)
            self._settle()
        for me, peer in ((one, other), (other, one)):
            self._greet(me, peer)

    def run(self, turns: int = 3000) -> None:
        """Everything goes well from here on, until nobody has anything to do."""
        idle = 0
        for _ in range(turns):
            happened = False
            for move in self.moves():
                happened |= self.do(move)
            if not happened and all(node.logic.is_empty for node in self.nodes):
                return
            if not happened:
                idle += 1
                self.tick(0.1 if idle < 20 else 1.0)
            else:
                self.tick(0.0)
        raise AssertionError("a dead end")

    def check_whole(self) -> None:
        for node in self.nodes:
            assert node.pool.num_free == node.pool.num_blocks, f"{node.info.node_id} leaks blocks"
            assert node.pool.reservations.is_empty, f"{node.info.node_id} leaks holds"
            assert node.handoffs.shares.is_idle
            node.check()

    # --- inside ---------------------------------------------------------------------------------------------

    def _greet(self, me: ShareNode, peer: ShareNode) -> None:
        me.logic.on_control(PeerUp(peer.info), self.now)
        self._settle()

    def _launch(self, node: ShareNode) -> bool:
        if len(node.steps) == 2 or not node.scheduler.state.has_work():
            return False
        output = node.scheduler.schedule()
        events = node.scheduler.state.take_events()  # of tokens that were withheld, say
        node.logic.on_engine_events(events)
        if output is None:
            self._settle()
            return bool(events)
        node.pool.step_launched(output.step_id)
        rows = node.scheduler._launched[output.step_id].row_requests
        node.steps.append((output, [node.tables_of(request) for request in rows]))
        if len(node.steps) == 1:
            self._begins(node, output)
        self._settle()
        return True

    def _begins(self, node: ShareNode, output: SchedulerOutput) -> None:
        """A step is at the head of its stream: the first layers of what it computes go out."""
        meta = output.connector_meta
        for push in meta.pushes if isinstance(meta, StepMoves) else ():
            if push.is_awaited and push.grant_id not in node.retired:
                self._say_layers(node, push)

    def _may_finish(self, node: ShareNode) -> bool:
        return all(self._has_come(node, each) is not None for each in self._arriving(node))

    @staticmethod
    def _arriving(node: ShareNode) -> tuple:
        meta = node.steps[0][0].connector_meta
        return meta.arriving if isinstance(meta, StepMoves) else ()

    def _has_come(self, node: ShareNode, arriving: Any) -> bool | None:
        """None: it may still come."""
        landing = node.landing.get(arriving.grant_id)
        if landing is not None and landing.has_come:
            return True
        return False if landing is None or landing.is_over or self.now >= arriving.deadline else None

    def _finish(self, node: ShareNode) -> None:
        spoiled = {each.slot: "lost" for each in self._arriving(node) if not self._has_come(node, each)}
        output, blocks = node.steps.popleft()
        rows = zip(output.rows, node.scheduler._launched[output.step_id].row_requests, blocks, strict=True)
        right = [node.compute(*row) for row in rows]
        meta = output.connector_meta
        if isinstance(meta, StepMoves):
            node.jobs += [*meta.pushes, *meta.whole]
        tokens = np.array([RIGHT if right[sample.row] else WRONG for sample in output.samples], np.int32)
        node.pool.step_completed(output.step_id)
        events = node.scheduler.update(output, RunnerOutput(output.step_id, tokens, spoiled_slots=spoiled))
        node.logic.on_engine_events(events)
        if node.steps:
            self._begins(node, node.steps[0][0])
        self._settle()

    def _transfer(self, node: ShareNode) -> None:
        """The next job of a node's transfer thread."""
        job = node.jobs.popleft()
        if isinstance(job, Verify):
            expected = [job.digests[i : i + 8] for i in range(0, len(job.digests), 8)]
            found = [node.content[block_id][:8] for block_id in job.block_ids]
            bad = tuple(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
            node.logic.on_transfer(Verified(job.key, job.grant_id, job.round, bad), self.now)
        elif isinstance(job, Retire):
            node.logic.on_transfer(Retired(job.key, job.grant_id), self.now)
        elif job.grant_id not in node.retired:
            self._run_source_job(node, job)
        self._settle()

    def _run_source_job(self, node: ShareNode, job: Any) -> None:
        grant = job.grant
        sink = self._node(grant.sink)
        if isinstance(job, Finalize):
            ready = KVReady(
                request_id=grant.request_id, attempt=grant.attempt, grant_id=grant.grant_id,
                grant_signature=grant.signature, source_id=node.info.node_id, source_epoch=node.info.epoch,
                sink_epoch=grant.sink_epoch, first_tokens=(), round=job.round,
                digests=b"".join(node.content[block_id][:8] for block_id in job.source_block_ids),
            )  # fmt: skip
            self.post.append((node, sink, ready))
            node.logic.on_transfer(ReadySent(job.key, grant.grant_id, ready), self.now)
            return
        landing = sink.landing[grant.grant_id]
        for source, destination in zip(job.source_block_ids, job.destination_block_ids, strict=True):
            assert node.pool.ref_count(source) > 0, "a push reads a block that was freed"
            assert sink.pool.ref_count(destination) > 0, "a write lands in a block that nobody holds"
            sink.content[destination] = GARBAGE if self.corrupts else node.content[source]
            landing.written.add(destination)
        self.corrupts = False
        if job.is_awaited:
            self._say_layers(node, job)

    def _say_layers(self, node: ShareNode, push: BlockPush) -> None:
        grant = push.grant
        said = KVLayers(
            request_id=grant.request_id, attempt=grant.attempt, grant_id=grant.grant_id,
            grant_signature=grant.signature, source_epoch=node.info.epoch, num_layers=1,
        )  # fmt: skip
        self.post.append((node, self._node(grant.sink), said))

    def _settle(self) -> None:
        """What the nodes want done, but for what takes time."""
        for node in self.nodes:
            while effects := node.handoffs.drain_effects():
                for effect in effects:
                    self._carry_out(node, effect)
            node.look_at_tiers()
            node.logic.drain_connects()
            for to, message in node.logic.drain_outbox():
                if to == ROUTER:
                    self.told += [message] if isinstance(message, Tokens | RequestFailed) else []
                    self._check_order(message)
                else:
                    self.post.append((node, self._node(to), message))
            if self.is_checked:
                node.check()

    def _check_order(self, message: Any) -> None:
        """Tokens that were withheld come before those behind them."""
        for delta in message.deltas if isinstance(message, Tokens) else ():
            place = (delta.request_id, delta.attempt, delta.sample_index)
            assert delta.output_index == self._num_told[place], f"{place}: {delta}"
            self._num_told[place] += len(delta.token_ids)

    def _carry_out(self, node: ShareNode, effect: Any) -> None:
        if isinstance(effect, Send):
            self.post.append((node, self._node(effect.to), effect.message))
        elif isinstance(effect, FenceSource):
            node.logic.on_transfer(Fenced(effect.node), self.now)
        elif isinstance(effect, OpenGrant):
            node.landing[effect.grant.grant_id] = Landing(effect.grant)
        elif isinstance(effect, CloseGrant):
            node.landing[effect.grant_id].is_over = True
        elif isinstance(effect, BlockPush | Finalize | Retire | Verify):
            node.jobs.append(effect)
            if isinstance(effect, Retire):
                node.retired.add(effect.grant_id)

    def _node(self, key: NodeKey) -> ShareNode:
        return next(node for node in self.nodes if node.info.key == key)
