"""One life of a node: its real logic, managers, book and pool, with a planner and clocks that the explorer moves."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from tandem.decode_node.node import DecodeNode
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.rate import Rate
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import NodeInfo, PeerRef
from tandem.engine.scheduling.ports import NoTiers
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.protocol import sink_table, source_table
from tandem.kv_connector.protocol.sink_table import SinkState as K
from tandem.kv_connector.protocol.source_table import SourceState as S
from tandem.kv_connector.sink.record import ENDED as SINK_ENDED
from tandem.kv_connector.sink.record import OVER as SINK_OVER
from tandem.kv_connector.sink.record import SinkRecord
from tandem.kv_connector.source.record import OVER as SOURCE_OVER
from tandem.kv_connector.source.record import SourceRecord
from tandem.node.control.events import PeerLost, PeerRefused, PeerUp, Received
from tandem.node.handoffs import Handoffs
from tandem.node.requests import RequestBook
from tandem.prefill_node.node import PrefillNode
from tests.worlds.lives import NOW
from tests.worlds.planner import Planner
from tests.worlds.setting import BLOCK

MAX_RESENDS = 2  # SinkMachine's own
LAYOUT = KVLayout((KVGroup(1, 1, 1, "float32"),), BLOCK)
_SOURCE_ENDED = (S.DRAINING, S.DRAINED, S.RETIRING, S.CLOSED)
_SINK_ENDED = (*SINK_OVER, K.QUARANTINED)
# What a record that is over is not asked for any more.
_NONE: frozenset[str] = frozenset()
_GIVEN_UP = frozenset({"ready", "first_tokens", "resend_indices", "num_pushed_blocks", "is_flushed", "continuation"})
_DRAINED = _GIVEN_UP | {"reason", "num_computed_tokens", "request"}
_CLOSED = _DRAINED | {"deadline", "resend_at"}
_SETTLED_SOURCE = {S.DRAINING: _GIVEN_UP, S.DRAINED: _DRAINED, S.RETIRING: _CLOSED - {"request"}, S.CLOSED: _CLOSED}
_PAST_GRANT = frozenset({"deadline", "lease_until", "ready", "bad_indices", "request"})
_SETTLED_SINK = {state: _PAST_GRANT | {"resend_at"} for state in SINK_ENDED} | {K.QUARANTINED: _PAST_GRANT}


class Keys(ClusterKeys):
    """Numbers grants by what they are for, not at random: so states can be compared."""

    def sign_grant(self, grant: KVGrant) -> KVGrant:
        pair = f"{grant.source_id}{grant.source_epoch}{grant.sink_id}{grant.sink_epoch}"
        number = zlib.crc32(f"{pair} {grant.request_id} {grant.attempt}".encode()) + 1
        return super().sign_grant(msgspec.structs.replace(grant, grant_id=number))

    def _signature(self, grant: KVGrant) -> bytes:
        """Blocks are alike: see lives.py."""
        return super()._signature(msgspec.structs.replace(grant, block_ids=()))


KEYS = Keys(b"k" * 16, False)


@dataclass(frozen=True)
class Possible:
    """`fault`: what it costs; `waits_for`: that nothing of this hand-off is under way."""

    event: tuple
    fault: str = ""
    waits_for: AttemptKey | None = None


@dataclass(frozen=True)
class Look:
    """What the world has to know of a node's state; keys name hand-offs."""

    possible: tuple[Possible, ...]
    granted: dict[AttemptKey, tuple[int, int]]  # grant, and how many blocks its hand-off holds
    read: frozenset[AttemptKey]  # whose blocks are held for transfers
    sinks: dict[AttemptKey, NodeKey]  # of this source, until nothing of them is under way
    open: frozenset[AttemptKey]  # that have not ended here
    untouched: frozenset[AttemptKey]  # prompts that were never asked to claim
    ended: frozenset[AttemptKey]
    is_whole: bool  # nothing is held, nothing is owed
    text: str


def make_info(node: NodeKey) -> NodeInfo:
    role: Any = {"p": "prefill", "d": "decode"}.get(node.node_id, "unified")
    return NodeInfo(node_id=node.node_id, epoch=node.epoch, role=role, layout=LAYOUT)


class ToldHandoffs(Handoffs):
    """Notes the ends of hand-offs, too."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.told: list[Any] = []

    def next_end(self) -> Any:
        ended = super().next_end()
        self.told += [] if ended is None else [ended]
        return ended


class Node:
    """`do` is one turn of the step loop, and every event comes at NOW."""

    def __init__(self, setting: Any, key: NodeKey) -> None:
        name = key.node_id
        self.options, self.info = setting.options(name), make_info(key)
        self._is_pipelined = setting.is_pipelined
        each = setting.num_windows
        window = BlockWindow(setting.window, BLOCK, each) if setting.window else NO_WINDOW
        self.pool = BlockPool((1 + each) * setting.num_blocks(name), enable_caching=True, window=window)
        self.handoffs = handoffs = ToldHandoffs(self.info, KEYS, self.pool, self.options, NoTiers(), Rate())
        self.planner = Planner(self.pool, None if name == "d" else handoffs.source.prompts, handoffs.puller)
        book = RequestBook(1 << 20, 1 << 20, self.pool.shares)
        kind = PrefillNode if name == "p" else DecodeNode
        self.logic = kind(self.info, book, self.planner, self.pool, 99, handoffs)  # type: ignore[arg-type]
        getattr(self.logic, "_ticket_loads", None)  # is made when it is first asked for
        self.source, self.sink = handoffs.source, handoffs.sink
        self.constants = [KEYS, source_table._ROWS, sink_table._ROWS]

    # --- what happens ---------------------------------------------------------------------------------------

    def do(self, event: tuple) -> list[Any]:
        effects = getattr(self, event[0])(*event[1:]) or []
        # What a sequence that leaves does by itself, in a few turns, ends before anything else happens.
        for _ in range(4 if self.logic.departures._departures else 1):
            self.logic.on_tick(NOW)
        effects += [*self.handoffs.drain_effects(), *self.handoffs.told]
        self.handoffs.told.clear()
        effects += self.logic.drain_outbox()
        self.logic.drain_connects()
        self.pool.drain_events()
        self.logic.check_integrity()
        return effects

    def hear(self, sender: NodeKey, message: Any) -> None:
        self.logic.on_control(Received(sender, message), NOW)

    def hear_pull(self, sender: NodeKey, message: Any, is_cached: bool) -> None:
        """Whether it still has what it is asked for is left open at each question."""
        self.pool.flush()
        if is_cached:
            raw = message.block_hashes
            self.cache([raw[i : i + 16] for i in range(0, len(raw), 16)])
        self.hear(sender, message)
        self.pool.flush()

    def cache(self, hashes: list[bytes]) -> None:
        """If there is room."""
        missing = hashes[len(self.pool.match_prefix(hashes)) :]
        blocks = self.pool.allocate(len(missing))
        for block_id, block_hash in zip(blocks or (), missing, strict=False):
            at = hashes.index(block_hash)
            self.pool.register(block_id, block_hash, hashes[at - 1] if at else None)
        self.pool.free(blocks or (), None)

    def transfer(self, event: Any) -> None:
        self.logic.on_transfer(event, NOW)

    def lose(self, node: NodeKey) -> None:
        """A life of another node that has ended."""
        self.logic.on_control(PeerLost(make_info(node), "it died"), NOW)

    def be_refused(self, node: NodeKey) -> None:
        """It was connected to when it was known to be gone: somebody else answers."""
        self.logic.on_control(PeerRefused(PeerRef(*node, ""), "another lives there"), NOW)

    def suspect_source(self, source: NodeKey) -> None:
        """Without reason: what it says is heard all the same, which is harsher than a connection that is cut."""
        self.sink.peers.lost(source)

    def greet(self, node: NodeKey) -> None:
        self.logic.on_control(PeerUp(make_info(node)), NOW)

    def suspect_sink(self, sink: NodeKey) -> None:
        """Without reason, and it is greeted again at once."""
        self.source.peers.lost(sink)
        self.source.peers.connected(make_info(sink))

    def blocks(self) -> Hashable:
        pool = self.pool
        found = [(each, pool.find(each) or 0) for each in pool.cached_hashes()]
        cached = [(each, pool.ref_count(at), pool.windows.is_whole(at)) for each, at in found]
        return pool.num_free, pool.num_grantable, tuple(sorted(cached)), tuple(pool.cold_end(pool.num_blocks))

    def settled(self, part: Any) -> frozenset[str]:
        if type(part) is SourceRecord:
            return _SETTLED_SOURCE.get(part.machine.state, _NONE)
        return _SETTLED_SINK.get(part.machine.state, _NONE) if type(part) is SinkRecord else _NONE

    # --- the planner ----------------------------------------------------------------------------------------

    def start(self, key: AttemptKey) -> list[Any]:
        return self.planner.start(self._request(key))

    def launch(self, key: AttemptKey) -> list[Any]:
        return self.planner.launch(self._request(key))

    def finish(self, key: AttemptKey, all_finished: bool = False) -> None:
        self.planner.finish(self._request(key), all_finished)

    def decode(self, key: AttemptKey, sample: int) -> None:
        self.planner.decode(self._request(key, sample))

    def land(self, key: AttemptKey, sample: int) -> None:
        self.logic.on_engine_events(self.planner.land(self._request(key, sample)))

    def make_token(self, key: AttemptKey, sample: int) -> None:
        self.decode(key, sample)
        self.land(key, sample)

    def preempt(self, key: AttemptKey, sample: int) -> None:
        self.planner.preempt(self._request(key, sample))

    def _request(self, key: AttemptKey, sample: int | None = None) -> Request:
        every = (*self.planner.waiting, *self.planner.running)
        return next(each for each in every if each.key == key and sample in (None, each.sample_indices[0]))

    # --- clocks ---------------------------------------------------------------------------------------------

    def source_timer(self, key: AttemptKey) -> None:
        self.source.ledger.records[key].resend_at = NOW

    def source_deadline(self, key: AttemptKey) -> None:
        self.source.ledger.records[key].deadline = NOW

    def forget(self, key: AttemptKey) -> None:
        self.source.ledger.records[key].closed_at = -NOW

    def sink_timer(self, key: AttemptKey) -> None:
        self.sink.ledger.records[key].resend_at = NOW

    def sink_deadline(self, key: AttemptKey) -> None:
        self.sink.ledger.records[key].deadline = NOW

    def lease(self, key: AttemptKey) -> None:
        self.sink.ledger.records[key].lease_until = NOW

    def stay_away(self, key: AttemptKey) -> None:
        self.sink.ledger.records[key].expected_at = -NOW

    def lose_patience(self) -> None:
        """Of the first claim in line, which lacks blocks."""
        self.sink.line._short_since = -NOW

    def ask_again(self, key: AttemptKey) -> None:
        self.handoffs.puller._by_key[key].resend_at = NOW

    # --- what may happen ------------------------------------------------------------------------------------

    def look(self) -> Look:
        sources, sinks = self.source.ledger.records, self.sink.ledger.records
        reads = {key for key, each in sources.items() if each.owns_blocks}
        reads |= {each.key for each in self.planner.running if each.prompt.mode == "prefill"}
        ids = self.sink.ledger.granted_ids
        granted = {key: (each.grant.grant_id, len(ids(each))) for key, each in sinks.items() if each.granted}
        for key, record in sinks.items():
            is_mine = all(self.pool.ref_count(block_id) == 1 for block_id in record.granted)
            assert is_mine, "a granted block has two holders"
            assert record.machine.round <= MAX_RESENDS, f"{key} is sent again more often than allowed"
        is_open = {key for key, each in sources.items() if each.machine.state not in _SOURCE_ENDED}
        is_open |= {key for key, each in sinks.items() if each.machine.state not in _SINK_ENDED}
        ended = {key for key, each in sources.items() if each.machine.state in _SOURCE_ENDED}
        ended |= {key for key, each in sinks.items() if each.machine.state in _SINK_ENDED}
        left = [key for key, each in sources.items() if each.machine.state not in SOURCE_OVER]
        left += [key for key, each in sinks.items() if each.machine.state not in SINK_OVER]
        states = [f"source of {key[0]} {each.machine.state.value}" for key, each in sources.items()]
        states += [f"sink of {key[0]} {each.machine.state.value}" for key, each in sinks.items()]
        states += [f"{self.pool.num_free} of {self.pool.num_blocks} blocks free"]
        return Look(
            possible=(*self._of_planner(), *self._of_source(), *self._of_sink()),
            granted=granted,
            read=frozenset(reads),
            sinks={key: each.peer.key for key, each in sources.items() if each.machine.state is not S.CLOSED},
            open=frozenset(is_open),
            untouched=frozenset(key for key, each in sources.items() if each.machine.state is S.IDLE and not each.hold),
            ended=frozenset({*ended, *self.handoffs.pull_server._answered} - is_open),
            is_whole=self.logic.is_empty and not left and self.pool.num_free == self.pool.num_blocks,
            text=f"{self.info.node_id}: {', '.join(states)}",
        )

    def _of_planner(self) -> Iterator[Possible]:
        for request in self.planner.waiting:
            yield Possible(("start", request.key))
        for request in self.planner.running:
            if request.prompt.mode != "prefill":
                yield from self._of_sequence(request.key, request.sample_indices[0], request)
            elif request.num_computed_tokens < request.num_prompt_tokens:
                yield Possible(("launch", request.key))
            else:
                yield Possible(("finish", request.key))
                yield Possible(("finish", request.key, True), "all_finished")

    def _of_sequence(self, key: AttemptKey, sample: int, request: Request) -> Iterator[Possible]:
        if request.num_in_flight:
            yield Possible(("land", key, sample))
        elif not request.is_paused:
            yield Possible(("decode" if self._is_pipelined else "make_token", key, sample))
            yield Possible(("preempt", key, sample), "preempt")

    def _of_source(self) -> Iterator[Possible]:
        for key, record in self.source.ledger.records.items():
            if record.machine.state is S.CLOSED:
                yield Possible(("forget", key), "forget")
                continue
            if record.resend_at:
                yield Possible(("source_timer", key), "", key)
            if record.deadline > NOW:
                yield Possible(("source_deadline", key), "source_deadline", key)

    def _of_sink(self) -> Iterator[Possible]:
        for key, record in self.sink.ledger.live.items():
            state = record.machine.state
            if state in SINK_ENDED or state is K.UNKNOWN:
                continue
            if state is K.EXPECTING and self.sink.peers.is_lost(record.source):
                yield Possible(("stay_away", key))
            if state in (K.RESENDING, K.QUARANTINED):
                yield Possible(("sink_timer", key), "", key)
            if state is not K.QUARANTINED and record.deadline > NOW:
                yield Possible(("sink_deadline", key), "sink_deadline", key)
            if record.granted and record.lease_until > NOW:
                yield Possible(("lease", key), "lease")
        if self.sink.line._short_since <= NOW:
            yield Possible(("lose_patience",), "", self.sink.line._queue[0].key)
        for key in self.handoffs.puller._by_key:
            if self.sink.is_unanswered(key):
                yield Possible(("ask_again", key), "", key)
