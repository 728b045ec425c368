"""A node in the model of migration_world.py: its sequences, the real Migrations, and both hand-off machines.

Sequences, blocks and jobs are modelled; what decides is real: `Migrations`, `SourceMachine`, `SinkMachine`. A hand-off
moves two units: "pre", pushed while the sequence runs, and "tail", when it stands still.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from migration_machines import SmallSinkMachine, SmallSourceMachine

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import Continuation
from tandem.engine.contracts.wire.requests import Migrate, RequestFailed, Submit, TokenDelta
from tandem.engine.scheduling.request import RequestState
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import HandoffCompleted, HandoffFailed
from tandem.kv_connector.protocol.sink_table import SinkAction, SinkEvent, SinkState
from tandem.kv_connector.protocol.source_table import SourceAction, SourceEvent, SourceState
from tandem.node.departures import Departures
from tests.worlds.setting import ViolationError

SOURCE_OVER = (SourceState.DRAINED, SourceState.CLOSED)
SINK_OVER = (SinkState.COMMITTED, SinkState.CLOSED, SinkState.REJECTED, SinkState.UNKNOWN)


@dataclass(eq=False, slots=True)
class Seq:
    """One sample's sequence, in the attributes that Migrations reads. Its prompt is one token; token i is number i."""

    key: AttemptKey
    sample: int
    num_outputs: int
    max_outputs: int
    num_in_flight: int = 0
    is_paused: bool = False
    state: RequestState = RequestState.RUNNING
    num_preemptions: int = 0
    block_ids: tuple[int, ...] = ()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @property
    def num_uncomputed_tokens(self) -> int:
        return 1

    @property
    def num_tokens(self) -> int:
        return 1 + self.num_outputs

    @property
    def num_launched_tokens(self) -> int:
        return self.num_tokens + self.num_in_flight

    @property
    def max_num_tokens(self) -> int:
        return 1 + self.max_outputs

    def known_token_ids(self, start: int) -> Any:
        return _Tokens(range(start - 1, self.num_outputs))

    def frozen(self) -> tuple:
        return (self.key, self.sample, self.num_outputs, self.num_in_flight, self.is_paused, self.state.value,
                self.num_preemptions)  # fmt: skip


class _Tokens(tuple):
    def tolist(self) -> list[int]:
        return list(self)


@dataclass(eq=False, slots=True)
class SourceRec:
    machine: SmallSourceMachine
    peer: str
    held: bool = False
    pushed: bool = False  # "pre"
    flushed: bool = True
    final: Continuation | None = None
    jobs: tuple = ()
    resend: tuple[str, ...] = ()
    failed: bool = False

    def frozen(self) -> tuple:
        final = self.final and (self.final.num_tokens, self.final.token_ids)
        return (self.machine.key(), self.peer, self.held, self.pushed, self.flushed, final, self.jobs, self.resend,
                self.failed)  # fmt: skip


@dataclass(eq=False, slots=True)
class SinkRec:
    machine: SmallSinkMachine
    source: str = ""
    submit: Submit | None = None
    contents: dict[str, str] = field(default_factory=dict)  # unit -> unwritten, good, bad; {}: holds no blocks
    final: Continuation | None = None
    verifying: bool = False
    recomputes: bool = False

    def frozen(self) -> tuple:
        final = self.final and (self.final.num_tokens, self.final.token_ids)
        return (self.machine.key(), self.source, self.submit is not None, tuple(sorted(self.contents.items())), final,
                self.verifying, self.recomputes)  # fmt: skip


class Node:
    """One life of a node. `send(peer, message)` and `tell(message)` (the router) are set by whoever opens the world.
    It stands for what Migrations sees of its node: SourceManager, Scheduler and RequestBook."""

    block_size = 1

    def __init__(self, name: str, epoch: int, max_outputs: int, pushes_early: bool) -> None:
        self.name, self.epoch, self.max_outputs, self.pushes_early = name, epoch, max_outputs, pushes_early
        self.seqs: list[Seq] = []
        self.entries: dict[AttemptKey, Any] = {}
        self.heard: set[AttemptKey] = set()
        self.sources: dict[AttemptKey, SourceRec] = {}
        self.sinks: dict[AttemptKey, SinkRec] = {}
        self.ends: list[Any] = []  # of hand-offs, to be told to Migrations
        self.state = self  # the scheduler's
        self.migrations = Departures(self, self, self)  # type: ignore[arg-type]
        self.send: Callable[[str, tuple], None]
        self.tell: Callable[[Any], None]

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name not in ("send", "tell")}

    def frozen(self) -> tuple:
        departures = tuple(
            (key, d.request.frozen(), bool(d.paused_at), d.is_handed_over, d.reason)
            for key, d in sorted(self.migrations._departures.items())
        )
        return (
            self.epoch, tuple(sorted(self.heard)), tuple(sorted(seq.frozen() for seq in self.seqs)),
            tuple(sorted((key, tuple(sorted(entry.open_samples))) for key, entry in self.entries.items())),
            tuple((key, record.frozen()) for key, record in sorted(self.sources.items())),
            tuple((key, record.frozen()) for key, record in sorted(self.sinks.items())), departures,
        )  # fmt: skip

    # --- the router's messages ------------------------------------------------------------------------------

    def on_submit(self, submit: Submit) -> None:
        key = submit.key
        assert key not in self.heard, "the router uses a number twice"
        self.heard.add(key)
        self.entries[key] = Entry("router", set(submit.sample_indices))
        if not submit.is_running:
            for sample in submit.sample_indices:
                self.run(Seq(key, sample, submit.num_prior_output_tokens, self.max_outputs))
            return
        record = self._sink(key)
        assert submit.peer is not None
        record.submit, record.source = submit, submit.peer.node_id
        self.run_sink(key, record.machine.on_submit(submit.peer.epoch))

    def on_cancel(self, key: AttemptKey, samples: tuple[int, ...]) -> None:
        entry = self.entries.get(key)
        for seq in [s for s in self.seqs if s.key == key and (not samples or s.sample in samples)]:
            self._finish(seq)
        if entry is None:
            return
        entry.open_samples -= set(samples) or set(entry.open_samples)
        if not entry.open_samples:
            del self.entries[key]
            if key in self.sinks:
                self.run_sink(key, self.sinks[key].machine.on(SinkEvent.CANCEL))

    def on_migrate(self, order: Migrate) -> None:
        self.migrations.begin("router", order, 0.0)

    def settle(self) -> None:
        """After each event: turns of the step loop until nothing more comes of them (push, pause, hand over, end)."""
        for _ in range(4 if self.migrations._departures or self.ends else 0):
            ends, self.ends = self.ends, []
            for end in ends:
                self.migrations.on_outcome(end, 1.0)
            self.migrations.advance(1.0)
        for _, message in self.migrations.drain_outbox():
            self.tell(message)

    # --- Scheduler and RequestBook, as Migrations sees them -------------------------------------------------

    def sequence_of(self, key: AttemptKey, sample: int) -> Seq | None:
        return next((seq for seq in self.seqs if (seq.key, seq.sample) == (key, sample)), None)

    def abort(self, key: AttemptKey, samples: tuple[int, ...]) -> None:
        for seq in [s for s in self.seqs if s.key == key and s.sample in samples]:
            self._finish(seq)

    def sample_left(self, key: AttemptKey, sample: int) -> None:
        self._close(key, sample)

    def run(self, seq: Seq) -> None:
        self.seqs.append(seq)

    def _finish(self, seq: Seq) -> None:
        seq.state = RequestState.FINISHED
        self.seqs.remove(seq)

    def _close(self, key: AttemptKey, sample: int) -> None:
        entry = self.entries.get(key)
        if entry is not None:
            entry.open_samples.discard(sample)
            if not entry.open_samples:
                del self.entries[key]

    def land_token(self, seq: Seq) -> None:
        seq.num_in_flight = 0
        index, seq.num_outputs = seq.num_outputs, seq.num_outputs + 1
        ends = seq.num_outputs == seq.max_outputs
        self.tell(TokenDelta(*seq.key, seq.sample, index, (index,), "length" if ends else None))
        if ends:
            self._finish(seq)
            self._close(seq.key, seq.sample)

    # --- SourceManager, as Migrations sees it ---------------------------------------------------------------

    def knows(self, key: AttemptKey) -> bool:
        return key in self.sources

    def follow(self, key: AttemptKey, peer: Any, most_tokens: int, deadline: float, now: float) -> None:
        record = SourceRec(SmallSourceMachine(self.epoch, peer.epoch), peer.node_id)
        self.sources[key] = record
        for event in (SourceEvent.CLAIM, SourceEvent.START):
            self.run_source(key, record.machine.on(event))

    def is_pushing(self, key: AttemptKey) -> bool:
        return self.sources[key].machine.state is SourceState.PUSHING

    def is_flushed(self, key: AttemptKey) -> bool:
        return self.sources[key].flushed

    def holds_blocks(self, key: AttemptKey) -> bool:
        return self.sources[key].held

    def push_settled(self, key: AttemptKey, block_ids: object, num_tokens: int, now: float) -> int:
        record = self.sources[key]
        record.held = True
        if record.pushed or not self.pushes_early:
            return 0
        record.pushed, record.flushed = True, False
        record.jobs += (("push", ("pre",)), ("flush",))
        return 2

    def hand_over(self, key: AttemptKey, block_ids: object, continuation: Continuation, now: float) -> None:
        self.sources[key].final = continuation
        self.run_source(key, self.sources[key].machine.on(SourceEvent.COMPUTED))

    def cancel(self, key: AttemptKey, now: float) -> None:
        self.run_source(key, self.sources[key].machine.on(SourceEvent.CANCEL))

    # --- actions --------------------------------------------------------------------------------------------

    def run_source(self, key: AttemptKey, actions: tuple[SourceAction, ...]) -> None:
        record = self.sources[key]
        machine = record.machine
        for action in actions:
            name = action.value
            if action is SourceAction.SEND_READY:
                self._to_sink(key, "ready", machine.grant_id, machine.round, record.final)
            elif name.startswith("send_"):
                self._to_sink(key, name.removeprefix("send_"), machine.grant_id)
            elif action is SourceAction.PUSH_COMPUTED:
                if record.final is not None:
                    both = ("tail",) if record.pushed or not self.pushes_early else ("pre", "tail")
                    record.jobs += (("push", both),)
            elif action is SourceAction.PUSH_AGAIN:
                record.jobs += (("push", record.resend),)
            elif action is SourceAction.FINALIZE:
                record.jobs += (("finalize", machine.round),)
            elif action is SourceAction.RETIRE:
                record.jobs = (*(job for job in record.jobs if job[0] == "sent"), ("retire",))
            elif action is SourceAction.FREE:
                if [job for job in record.jobs if job[0] in ("push", "finalize")]:
                    raise ViolationError(f"blocks of {key} are given back while a job reads them")
                record.held = False
            elif action is SourceAction.END_COMMITTED:
                self.ends.append(HandoffCompleted(key, ""))
            elif action in (SourceAction.END_REFUSED, SourceAction.END_FAILED):
                self.ends.append(HandoffFailed(key, "it failed", True))

    def _to_sink(self, key: AttemptKey, kind: str, *data: object) -> None:
        record = self.sources[key]
        self.send(record.peer, (kind, key, self.name, self.epoch, record.machine.sink_epoch, *data))

    def on_refused(self, key: AttemptKey, reason: str) -> None:
        """The sink says why: one that computes the sequence itself has it."""
        record = self.sources[key]
        actions = record.machine.on(SourceEvent.REFUSED)
        if reason == outcomes.RECOMPUTING and SourceAction.END_REFUSED in actions:
            actions = tuple(action for action in actions if action is not SourceAction.END_REFUSED)
            self.ends.append(HandoffCompleted(key, reason))
        self.run_source(key, actions)

    def _sink(self, key: AttemptKey) -> SinkRec:
        if key not in self.sinks:
            self.sinks[key] = SinkRec(SmallSinkMachine(self.epoch, 1))
        return self.sinks[key]

    def run_sink(self, key: AttemptKey, actions: tuple[SinkAction, ...]) -> None:
        record = self.sinks[key]
        machine = record.machine
        record.recomputes |= SinkAction.RECOMPUTE in actions
        for action in actions:
            name = action.value
            if name.startswith("send_") and action is not SinkAction.SEND_WAIT:
                data: tuple = (machine.grant_id,)
                if action is SinkAction.SEND_RESEND:
                    data += (machine.round, tuple(unit for unit, c in record.contents.items() if c != "good"))
                elif action is SinkAction.SEND_REFUSED:
                    data += (outcomes.RECOMPUTING if record.recomputes else "",)
                self.send(record.source, (name.removeprefix("send_"), key, self.name, self.epoch,
                                          machine.source_epoch, *data))  # fmt: skip
            elif action is SinkAction.VERIFY:
                record.verifying = True
            elif action is SinkAction.FREE:
                record.contents = {}
            elif action is SinkAction.COMMIT:
                if set(record.contents.values()) != {"good"}:
                    raise ViolationError(f"{key} is committed with {record.contents}")
                record.contents = {}
                self._take_over(key, record)
            elif action is SinkAction.RECOMPUTE:
                self._take_over(key, record)
            elif action is SinkAction.END_FAILED and record.submit is not None and key in self.entries:
                del self.entries[key]
                self.tell(RequestFailed(request_id=key[0], attempt=key[1], code="x", message="", retryable=True))
            elif action is SinkAction.END_RELEASED:
                self.entries.pop(key, None)

    def _take_over(self, key: AttemptKey, record: SinkRec) -> None:
        assert record.submit is not None
        assert record.final is not None
        if key not in self.entries:
            return
        (sample,) = record.submit.sample_indices
        first, tail = record.submit.num_prior_output_tokens, record.final.token_ids
        if tail:
            self.tell(TokenDelta(*key, sample, first, tail))
        self.run(Seq(key, sample, first + len(tail), self.max_outputs))


@dataclass(eq=False, slots=True)
class Entry:
    router: Any
    open_samples: set[int]
