"""Model of the world around the hand-off's real transition tables: two nodes, a network, two pools, a transport.

A state is a tuple; `World` opens one, applies one event, and freezes the result. Sources and sinks are the real
machines; what their managers add (claim order, pins, parked share, what an action means in blocks, messages and jobs)
is modelled here after the source and sink managers of kv_connector. Deliberately harsher than reality:

- the network is a set without order, and a new life of a node still hears what was sent to the old one;
- deadlines, leases, cancels and wrong suspicions may come at any moment (each costs one fault of the budget);
- nobody but the two nodes helps: the router cancels only by a fault.

A block has no number here. A write is aimed at (grant, index), and a grant names exactly one ownership of its blocks:
"the grant's record does not hold its blocks any more" is "the block may be free or another's".
"""

from __future__ import annotations

from handoff_records import SINK_OVER, SinkRecord, SourceRecord
from handoff_setting import Setting, ViolationError
from handoff_sink_pool import SinkPool

from tandem.kv_connector.protocol.sink_table import SinkAction, SinkEvent
from tandem.kv_connector.protocol.source_table import SourceAction, SourceEvent


class World(SinkPool):
    """One state, opened. Attributes are the fields of the frozen tuple, in its order."""

    def __init__(self, setting: Setting, state: tuple) -> None:
        self.setting = setting
        (self.source_epoch, self.sink_epoch, placed, pending, sources, sinks, network, writes, queue, lost, fences,
         cached, held, source_ends, sink_ends, self.faults_left) = state  # fmt: skip
        self.placed, self.pending = list(placed), set(pending)  # epochs of the two nodes; submits and cancels under way
        self.sources = [each and SourceRecord.thaw(setting, each) for each in sources]
        self.sinks = [each and SinkRecord.thaw(setting, each) for each in sinks]
        self.network, self.writes = set(network), set(writes)  # writes: (grant_id, index, request, source epoch)
        self.queue, self.lost = list(queue), set(lost)  # lost: source epochs, until they are greeted again
        self.fences = list(fences)  # asked for and not ended: an epoch as often as it was lost
        self.cached, self.held = list(cached), list(held)
        self.source_ends, self.sink_ends = list(source_ends), list(sink_ends)

    def freeze(self) -> tuple:
        return (
            self.source_epoch, self.sink_epoch, tuple(self.placed), frozenset(self.pending),
            tuple([each and each.freeze() for each in self.sources]),
            tuple([each and each.freeze() for each in self.sinks]),
            frozenset(self.network), frozenset(self.writes), tuple(self.queue), frozenset(self.lost),
            tuple(sorted(self.fences)), tuple(self.cached), tuple(self.held), tuple(self.source_ends),
            tuple(self.sink_ends), self.faults_left,
        )  # fmt: skip

    # --- router ---------------------------------------------------------------------------------------------

    def place(self, r: int) -> None:
        self.placed[r] = (self.source_epoch, self.sink_epoch)
        self.pending |= {("submit_source", r), ("submit_sink", r)}

    def cancel(self, r: int) -> None:
        self.pending |= {("cancel_source", r), ("cancel_sink", r)}

    def submit_source(self, r: int) -> None:
        source_epoch, sink_epoch = self.placed[r]
        machine = self.setting.source_machine(source_epoch, sink_epoch, self.setting.source_rows)
        self.sources[r] = SourceRecord(machine)

    def submit_sink(self, r: int) -> None:
        record = self.sink_record(r)
        self._pin(r, record)
        epoch = self.placed[r][0]
        self.run_sink(r, record.machine.on_submit(epoch))
        if record.machine.state in SINK_OVER:
            record.pinned = False
        self.settle(r)

    def cancel_source(self, r: int) -> None:
        if self.sources[r]:
            self.run_source(r, self.sources[r].machine.on(SourceEvent.CANCEL))

    def cancel_sink(self, r: int) -> None:
        if self.sinks[r]:
            self.run_sink(r, self.sinks[r].machine.on(SinkEvent.CANCEL))
            self.settle(r)

    # --- source ---------------------------------------------------------------------------------------------

    def ask_to_claim(self, r: int) -> None:
        """The scheduler asks for a prompt that may not claim yet: it keeps new ones from parking before it."""
        self.sources[r].was_asked = True

    def on_source(self, r: int, event: SourceEvent) -> None:
        self.run_source(r, self.sources[r].machine.on(event))

    def start_prompt(self, r: int) -> None:
        self.sources[r].has_blocks = True
        self.on_source(r, SourceEvent.START)

    def push_early(self, r: int) -> None:
        """A layer's push while the prompt is being computed; here, the first block."""
        self.sources[r].num_pushed = 1
        self.sources[r].jobs += (("push", (0,)),)

    def compute(self, r: int, ends: bool) -> None:
        self.sources[r].is_computed = True
        self.on_source(r, SourceEvent.ALL_FINISHED if ends else SourceEvent.COMPUTED)

    def run_source(self, r: int, actions: tuple[SourceAction, ...]) -> None:
        record = self.sources[r]
        machine, epochs = record.machine, (self.source_epoch, record.machine.sink_epoch)
        for action in actions:
            match action:
                case SourceAction.SEND_CLAIM:
                    self.network.add(("claim", r, *epochs))
                case SourceAction.SEND_READY:
                    self.network.add(("ready", r, *epochs, machine.grant_id, machine.round))
                case SourceAction.SEND_RELEASE:
                    self.network.add(("release", r, *epochs))
                case SourceAction.SEND_DRAINED:
                    self.network.add(("drained", r, *epochs, machine.grant_id))
                case SourceAction.PUSH_COMPUTED:
                    if record.is_computed and record.num_pushed < record.num_granted:
                        record.jobs += (("push", tuple(range(record.num_pushed, record.num_granted))),)
                        record.num_pushed = record.num_granted
                case SourceAction.PUSH_AGAIN:
                    record.jobs += (("push", record.resend_indices),)
                case SourceAction.FINALIZE:
                    record.jobs += (("finalize", machine.round),)
                case SourceAction.RETIRE:
                    # Queued jobs of the grant are dropped at once; the word that KVReady was sent is on its way.
                    record.jobs = (*(job for job in record.jobs if job[0] == "sent"), ("retire",))
                case SourceAction.FREE:
                    self._free_source(r)
                case _:
                    self._end(self.source_ends, r, action.value.removeprefix("end_"), "source")

    def _free_source(self, r: int) -> None:
        record = self.sources[r]
        reads = [job for job in record.jobs if job[0] in ("push", "finalize")]
        stores = [w for w in self.writes if w[2] == r and w[3] == self.source_epoch] if self.setting.one_sided else []
        if record.has_blocks and (reads or stores):
            raise ViolationError(f"source blocks of request {r} are freed while a transfer job reads them")
        record.has_blocks = False

    def run_job(self, r: int) -> None:
        """The transfer thread takes the next job of this hand-off."""
        record = self.sources[r]
        machine = record.machine
        (kind, *data), record.jobs = record.jobs[0], record.jobs[1:]
        if kind in ("push", "finalize") and (record.failed or not self._can_write(record)):
            if not record.failed:
                self.fail_push(r)
        elif kind == "push":
            self.writes |= {(machine.grant_id, index, r, self.source_epoch) for index in data[0]}
        elif kind == "finalize":
            self.network.add(("ready", r, self.source_epoch, machine.sink_epoch, machine.grant_id, data[0]))
            record.jobs = (("sent", data[0]), *record.jobs)
        elif kind == "sent":
            self.run_source(r, machine.on_sent(machine.grant_id, data[0]))
        else:
            self.run_source(r, machine.on_retired(machine.grant_id))

    def fail_push(self, r: int) -> None:
        record = self.sources[r]
        record.failed = True
        record.jobs = tuple(job for job in record.jobs if job[0] in ("sent", "retire"))
        self.run_source(r, record.machine.on_push_failed(record.machine.grant_id))

    def _can_write(self, record: SourceRecord) -> bool:
        epoch = self.source_epoch
        barred = epoch in self.lost and epoch not in self.fences and self.setting.fences_living
        return record.machine.sink_epoch == self.sink_epoch and not barred and not record.refused

    def source_loses_sink(self, epoch: int) -> None:
        for r, record in enumerate(self.sources):
            if record and record.machine.sink_epoch == epoch:
                if not self.setting.one_sided:
                    record.failed = True  # its channel is closed under it
                self.run_source(r, record.machine.on_sink_lost(epoch))

    # --- sink -----------------------------------------------------------------------------------------------

    def sink_record(self, r: int) -> SinkRecord:
        record = self.sinks[r]
        if record is None:
            setting = self.setting
            record = SinkRecord(setting.sink_machine(self.sink_epoch, setting.max_resends, setting.sink_rows))
            self.sinks[r] = record
        return record

    def on_sink(self, r: int, event: SinkEvent) -> None:
        self.run_sink(r, self.sinks[r].machine.on(event))
        self.settle(r)

    def run_sink(self, r: int, actions: tuple[SinkAction, ...]) -> None:
        record = self.sinks[r]
        machine = record.machine
        for action in actions:
            if action.value.startswith("send_"):
                self._send_to_source(r, record, action)
                continue
            match action:
                case SinkAction.OPEN_GRANT:
                    record.is_open = True
                case SinkAction.CLOSE_GRANT:
                    record.is_open = False
                case SinkAction.VERIFY:
                    record.verifying = True
                case SinkAction.UNPIN:
                    record.pinned = False
                case SinkAction.FREE:
                    record.contents = ()
                case SinkAction.COMMIT:
                    if set(record.contents) != {"good"}:
                        raise ViolationError(f"request {r} is committed with blocks {record.contents}")
                    if machine.source_epoch != self.placed[r][0] or machine.sink_epoch != self.sink_epoch:
                        raise ViolationError(f"request {r} is committed by another life of a node")
                    self.held[r] = self.setting.granted[r] + (self.setting.hits[r] if record.pinned else 0)
                    record.pinned, record.contents = False, ()
                    self._end(self.sink_ends, r, "committed", "sink")
                case _:
                    self._end(self.sink_ends, r, action.value.removeprefix("end_"), "sink")

    def _send_to_source(self, r: int, record: SinkRecord, action: SinkAction) -> None:
        machine = record.machine
        data: tuple = ()
        if action is SinkAction.SEND_WAIT:
            return  # news to nobody: a source does nothing on KVWait in any state
        if action is SinkAction.SEND_GRANT:
            data = (machine.source_epoch, len(record.contents))
        elif action is SinkAction.SEND_RESEND:
            data = (machine.round, record.bad_indices)
        kind = action.value.removeprefix("send_")
        self.network.add((kind, r, self.sink_epoch, machine.source_epoch, machine.grant_id, *data))

    def verify(self, r: int) -> None:
        record = self.sinks[r]
        record.verifying = False
        record.bad_indices = tuple(i for i, content in enumerate(record.contents) if content != "good")
        matches = not record.bad_indices or "no_digest_check" in self.setting.flaws
        self.run_sink(r, record.machine.on_verified(record.machine.grant_id, record.machine.round, matches))
        self.settle(r)

    def sink_loses_source(self, epoch: int) -> None:
        self.lost.add(epoch)
        self.fences.append(epoch)
        for r, record in enumerate(self.sinks):
            if record:
                self.run_sink(r, record.machine.on_source_lost(epoch))
                self.settle(r)

    def source_stays_away(self, r: int) -> None:
        """A ticket of a lost source has waited long enough for its greeting."""
        machine = self.sinks[r].machine
        self.run_sink(r, machine.on_source_lost(machine.source_epoch))
        self.settle(r)

    def fence(self, epoch: int) -> None:
        """The transport's word that no write can land any more under a grant that was open when the source of that
        epoch was lost for the last time: it makes that true first."""
        self.fences.remove(epoch)
        if epoch in self.fences and "first_fence_counts" not in self.setting.flaws:
            return
        every = "fence_of_newer_grants" in self.setting.flaws
        seen = {r for r, record in enumerate(self.sinks) if record and record.machine.source_lost}
        if "fence_lets_writes_through" not in self.setting.flaws and epoch not in self.fences:
            self.writes = {write for write in self.writes if write[3] != epoch or write[2] not in seen}
        for r, record in enumerate(self.sinks):
            if record and (every or r in seen):
                if record.machine.source_epoch == epoch and r in seen:
                    record.is_open = False
                    if self.setting.is_revocable and self.sources[r]:
                        self.sources[r].refused = True
                self.run_sink(r, record.machine.on_fenced(epoch))
                self.settle(r)

    def reconnect(self) -> None:
        """The living source that the sink took for lost is greeted again, its fence ended or not."""
        self.lost.discard(self.source_epoch)

    # --- both -----------------------------------------------------------------------------------------------

    def _end(self, ends: list[str], r: int, outcome: str, side: str) -> None:
        if ends[r]:
            raise ViolationError(f"request {r} ends twice on its {side}: {ends[r]}, then {outcome}")
        ends[r] = outcome


def start(setting: Setting) -> tuple:
    """The frozen state in which everything begins."""
    none = (None,) * setting.num_requests
    cached = tuple(hits > 0 for hits in setting.hits)
    no_end = ("",) * setting.num_requests
    empty: frozenset = frozenset()
    zeros = (0,) * setting.num_requests
    state = (1, 11, none, empty, none, none, empty, empty, (), empty, empty, cached, zeros, no_end, no_end,
             setting.max_faults)  # fmt: skip
    if not setting.submitted:
        return state
    world = World(setting, state)
    for r in range(setting.num_requests):
        world.place(r)
        world.submit_source(r)
        world.submit_sink(r)
    world.pending = set()
    return world.freeze()
