"""Model of the world around running sequences that move: a router, three nodes, the ways between them, faults.

Real: RequestMachine (the router's), Migrations, SourceMachine and SinkMachine. Links between the router and a node keep
their order, as the control sockets do; between nodes the network is a set without order, and every fault costs one of
the bound. A node that dies takes its links along and comes back empty, with another epoch.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from migration_machines import Machine
from migration_nodes import Node
from migration_setting import MigrationSetting

from tandem.engine.contracts.errors import ClientGoneError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import (
    Cancel,
    Cancelled,
    Migrate,
    Migrated,
    RequestFailed,
    Submit,
    TokenDelta,
)
from tandem.kv_connector.protocol.sink_table import SinkEvent
from tandem.kv_connector.protocol.source_table import SourceEvent
from tandem.router.placing.placement import Placement
from tandem.router.requests.actions import EmitTokens, Fail, Finish, Place, SendToNode
from tests.worlds.setting import ViolationError


@dataclass
class World:
    setting: MigrationSetting
    machines: list[Machine]
    nodes: dict[str, Node]
    to_node: dict[str, list] = field(default_factory=dict)
    to_router: dict[str, list] = field(default_factory=dict)
    network: set[tuple] = field(default_factory=set)
    writes: set[tuple] = field(default_factory=set)  # (key, unit, source, source epoch, sink, grant_id)
    dead: set[tuple[str, int]] = field(default_factory=set)  # epochs whose death somebody has yet to notice
    asked: set[int] = field(default_factory=set)  # moves that were asked for
    faults_left: int = 0

    # --- state ----------------------------------------------------------------------------------------------

    def pack(self) -> bytes:
        state = (self.machines, self.nodes, self.to_node, self.to_router, self.network, self.writes, self.dead,
                 self.asked, self.faults_left)  # fmt: skip
        return pickle.dumps(state, protocol=5)

    @staticmethod
    def unpack(setting: MigrationSetting, packed: bytes) -> World:
        world = World(setting, *pickle.loads(packed))
        for r, machine in enumerate(world.machines):
            machine.spec = setting.spec(r)
        world.bind()
        return world

    def bind(self) -> None:
        for name, node in self.nodes.items():
            node.send = lambda peer, message: self.network.add((peer, *message))
            node.tell = lambda message, name=name: self.to_router[name].append(message)

    def frozen(self) -> tuple:
        return (
            tuple(machine.frozen() for machine in self.machines), tuple(n.frozen() for n in self.nodes.values()),
            tuple(tuple(map(_frozen, link)) for link in self.to_node.values()),
            tuple(tuple(map(_frozen, link)) for link in self.to_router.values()),
            frozenset(map(_plain, self.network)), frozenset(self.writes), frozenset(self.dead), frozenset(self.asked),
            self.faults_left,
        )  # fmt: skip

    # --- router ---------------------------------------------------------------------------------------------

    def ref(self, name: str) -> PeerRef:
        return PeerRef(name, self.nodes[name].epoch, name)

    def do(self, r: int, actions: list) -> None:
        for action in actions:
            if isinstance(action, Place):
                self._place(r, action.request_id)
            elif isinstance(action, SendToNode):
                name, epoch = action.node
                if self.nodes[name].epoch == epoch:
                    self.to_node[name].append(action.message)
            elif isinstance(action, EmitTokens):
                sample = self.machines[r].samples[action.sample_index]
                if sample.token_ids != list(range(len(sample.token_ids))):
                    raise ViolationError(f"the client sees {sample.token_ids}")
        self.machines[r].check_integrity()

    def _place(self, r: int, request_id: str) -> None:
        machine = self.machines[r]
        avoid = {name for name, _ in machine.attempts.live[request_id].avoid}
        name = next((name for name in self.nodes if name not in avoid), next(iter(self.nodes)))
        self.do(r, machine.placed(request_id, Placement(self.ref(name), None, "test"), 0.0))

    def can_move(self, number: int) -> bool:
        r, sample, source, _ = self.setting.moves[number]
        node = NodeKey(source, self.nodes[source].epoch)
        return number not in self.asked and sample in self.machines[r].moves.movable(node, 100.0)

    def move(self, number: int) -> None:
        self.asked.add(number)
        r, sample, source, target = self.setting.moves[number]
        self.do(r, self.machines[r].move(sample, self.ref(source), self.ref(target), 0.0, 10.0))

    def router_hears(self, name: str) -> None:
        message, node = self.to_router[name].pop(0), NodeKey(name, self.nodes[name].epoch)
        request_id = message.request_id
        r = int(request_id[1:].split("-")[0])
        machine = self.machines[r]
        if isinstance(message, TokenDelta):
            self.do(r, machine.tokens(node, message, 0.0))
        elif isinstance(message, Migrated):
            self.do(r, machine.migrated(node, message, 0.0))
        else:
            assert isinstance(message, RequestFailed)
            self.do(r, machine.request_failed(node, message, 0.0))

    def node_hears(self, name: str) -> None:
        message, node = self.to_node[name].pop(0), self.nodes[name]
        if isinstance(message, Submit):
            node.on_submit(message)
        elif isinstance(message, Migrate):
            node.on_migrate(message)
        else:
            assert isinstance(message, Cancel)
            node.on_cancel(message.key, message.sample_indices)
            self._answer_cancel(name, message)

    def _answer_cancel(self, name: str, message: Cancel) -> None:
        """At once: nothing but the end of the router's memory of it depends on when the answer comes."""
        answer = Cancelled(
            request_id=message.request_id, attempt=message.attempt, sample_indices=message.sample_indices
        )
        for machine in self.machines:
            machine.cancelled(NodeKey(name, self.nodes[name].epoch), answer)

    # --- nodes ----------------------------------------------------------------------------------------------

    def launch(self, name: str, key: tuple, sample: int) -> None:
        seq = self.nodes[name].sequence_of(key, sample)
        assert seq is not None
        seq.num_in_flight = 1
        if not self.setting.is_pipelined:
            self.nodes[name].land_token(seq)

    def land_token(self, name: str, key: tuple, sample: int) -> None:
        seq = self.nodes[name].sequence_of(key, sample)
        assert seq is not None
        self.nodes[name].land_token(seq)

    def run_job(self, name: str, key: tuple) -> None:
        node = self.nodes[name]
        record = node.sources[key]
        machine = record.machine
        (kind, *data), record.jobs = record.jobs[0], record.jobs[1:]
        if kind in ("push", "flush", "finalize") and (record.failed or not self._sink_lives(record)):
            if not record.failed:
                self.fail_push(name, key)
        elif kind == "push":
            target = (name, node.epoch, record.peer, machine.grant_id)
            self.writes |= {(key, unit, *target) for unit in data[0]}
        elif kind == "flush":
            record.flushed = True
        elif kind == "finalize":
            node._to_sink(key, "ready", machine.grant_id, data[0], record.final)
            record.jobs = (("sent", data[0]), *record.jobs)
        elif kind == "sent":
            node.run_source(key, machine.on_sent(machine.grant_id, data[0]))
        else:
            node.run_source(key, machine.on_retired(machine.grant_id))

    def fail_push(self, name: str, key: tuple) -> None:
        record = self.nodes[name].sources[key]
        record.failed = True
        record.jobs = tuple(job for job in record.jobs if job[0] in ("sent", "retire"))
        self.nodes[name].run_source(key, record.machine.on_push_failed(record.machine.grant_id))

    def _sink_lives(self, record: Any) -> bool:
        return self.nodes[record.peer].epoch == record.machine.sink_epoch

    def land(self, write: tuple, content: str) -> None:
        self.writes.discard(write)
        key, unit, _, _, sink, grant_id = write
        record = self.nodes[sink].sinks.get(key)
        if grant_id // 100 != self.nodes[sink].epoch:
            return  # into the memory of a process that is gone
        if record is None or record.machine.grant_id != grant_id or not record.contents:
            raise ViolationError(f"a write of {key} lands in a block that may be free or another's")
        record.contents[unit] = content

    def grant(self, name: str, key: tuple) -> None:
        node = self.nodes[name]
        record = node.sinks[key]
        record.contents = dict.fromkeys(("pre", "tail") if self.setting.pushes_early else ("tail",), "unwritten")
        node.run_sink(key, record.machine.on_can_grant(100 * node.epoch + len(node.sinks)))

    def refuse(self, name: str, key: tuple) -> None:
        """No room."""
        self.nodes[name].run_sink(key, self.nodes[name].sinks[key].machine.on(SinkEvent.DEADLINE))

    def verify(self, name: str, key: tuple) -> None:
        node = self.nodes[name]
        record = node.sinks[key]
        record.verifying = False
        good = set(record.contents.values()) == {"good"} or "no_digest_check" in self.setting.flaws
        node.run_sink(key, record.machine.on_verified(record.machine.grant_id, record.machine.round, good))

    def on_source(self, name: str, key: tuple, event: SourceEvent) -> None:
        self.nodes[name].run_source(key, self.nodes[name].sources[key].machine.on(event))

    def on_sink(self, name: str, key: tuple, event: SinkEvent) -> None:
        self.nodes[name].run_sink(key, self.nodes[name].sinks[key].machine.on(event))

    def preempt(self, name: str, key: tuple, sample: int) -> None:
        """And started over at once."""
        seq = self.nodes[name].sequence_of(key, sample)
        assert seq is not None
        seq.num_preemptions += 1

    # --- between nodes --------------------------------------------------------------------------------------

    def deliver(self, message: tuple, keep: bool = False) -> None:
        if not keep:
            self.network.discard(message)
        to, kind, *_ = message
        if kind in ("claim", "ready", "release", "drained"):
            self._sink_hears(self.nodes[to], message)
        else:
            self._source_hears(self.nodes[to], message)

    def _sink_hears(self, node: Node, message: tuple) -> None:
        _, kind, key, sender, sender_epoch, own_epoch, grant_id, *data = message
        record = node._sink(key)
        record.source = record.source or sender
        machine = record.machine
        if kind == "claim":
            actions = machine.on_claim(sender_epoch, own_epoch)
        elif kind == "ready":
            record.final = data[1] if machine.grant_id == grant_id and record.final is None else record.final
            actions = machine.on_ready(grant_id, sender_epoch, own_epoch, data[0])
        elif kind == "release":
            actions = machine.on_release(sender_epoch)
        else:
            actions = machine.on_drained(sender_epoch, grant_id)
        node.run_sink(key, actions)

    def _source_hears(self, node: Node, message: tuple) -> None:
        _, kind, key, sender, sender_epoch, own_epoch, grant_id, *data = message
        record = node.sources.get(key)
        if record is None or record.machine.sink_epoch != sender_epoch:
            if kind == "refused":
                self.network.add((sender, "drained", key, node.name, node.epoch, sender_epoch, 0))
            return
        machine = record.machine
        if kind == "refused":
            node.on_refused(key, data[0])
            return
        if kind == "grant":
            actions = machine.on_grant(grant_id, own_epoch, sender_epoch)
        elif kind == "committed":
            actions = machine.on_committed(grant_id)
        elif kind == "resend":
            record.resend = data[1]
            actions = machine.on_resend(grant_id, data[0])
        else:
            actions = machine.on(SourceEvent.DRAINED_ACK)
        node.run_source(key, actions)

    # --- lives ----------------------------------------------------------------------------------------------

    def crash(self, name: str) -> None:
        """Its own writes end with it; the router and the other nodes notice in their own time."""
        old = self.nodes[name]
        self.writes = {w for w in self.writes if (w[2], w[3]) != (name, old.epoch)}
        self.dead |= {(name, old.epoch)}
        self.nodes[name] = Node(name, old.epoch + 10, old.max_outputs, old.pushes_early)
        self.to_node[name], self.to_router[name] = [], []
        self.bind()
        for r, machine in enumerate(self.machines):
            self.do(r, machine.node_lost(NodeKey(name, old.epoch), "it died", 0.0))

    def source_loses(self, name: str, key: tuple) -> None:
        record = self.nodes[name].sources[key]
        self.nodes[name].run_source(key, record.machine.on_sink_lost(record.machine.sink_epoch))

    def sink_loses(self, name: str, key: tuple) -> None:
        record = self.nodes[name].sinks[key]
        self.nodes[name].run_sink(key, record.machine.on_source_lost(record.machine.source_epoch))

    def fence(self, name: str, key: tuple) -> None:
        record = self.nodes[name].sinks[key]
        self.nodes[name].run_sink(key, record.machine.on_fenced(record.machine.source_epoch))

    def client_gone(self, r: int) -> None:
        self.do(r, self.machines[r].abort(ClientGoneError("it left")))

    def give_up(self, r: int) -> None:
        self.do(r, self.machines[r].moves.give_up_overdue(1e9))

    # --- ends -----------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """Nothing more will happen."""
        for r, machine in enumerate(self.machines):
            if machine.outcome is None:
                raise ViolationError(f"request {r} waits for ever: {machine.frozen()}")
            if isinstance(machine.outcome, Fail) and machine.outcome.error.status != 499:
                raise ViolationError(f"request {r} fails: {machine.outcome.error.message}")
            if isinstance(machine.outcome, Finish):
                outputs = [sample.token_ids for sample in machine.samples]
                assert outputs == [list(range(self.setting.max_outputs))] * len(outputs), outputs
        for node in self.nodes.values():
            if node.seqs or node.entries or node.migrations._departures:
                raise ViolationError(f"node {node.name} has {node.frozen()}")
            if any(record.held or record.jobs for record in node.sources.values()):
                raise ViolationError(f"node {node.name} holds blocks for a transfer")
            if any(record.contents for record in node.sinks.values()):
                raise ViolationError(f"node {node.name} holds granted blocks")


def _frozen(message: Any) -> tuple:
    return (type(message).__name__, repr(message))


def _plain(message: tuple) -> tuple:
    return tuple(repr(part) if hasattr(part, "__struct_fields__") else part for part in message)


def start(setting: MigrationSetting) -> World:
    """Every request runs on its node and has streamed its first token."""
    machines = [Machine(setting.spec(r), 0.0) for r in range(len(setting.starts))]
    nodes = {
        name: Node(name, 1 + index, setting.max_outputs, setting.pushes_early)
        for index, name in enumerate(setting.nodes)
    }
    links: list[dict[str, list]] = [{name: [] for name in nodes} for _ in range(2)]
    world = World(setting, machines, nodes, *links, faults_left=setting.max_faults)
    world.bind()
    for r, name in enumerate(setting.starts):
        machine = world.machines[r]
        world.do(r, machine.placed(f"r{r}", Placement(world.ref(name), None, "test"), 0.0))
        world.node_hears(name)
        for seq in list(world.nodes[name].seqs):
            if seq.key == (f"r{r}", 1):
                world.nodes[name].land_token(seq)
        while world.to_router[name]:
            world.router_hears(name)
    return world
