"""Migration of running sequences to another node: pushes them while they run, and decides when they stand still.

The node goes on with a sequence while its full blocks are pushed, in rounds, each with what has become full during the
one before. When a round finds next to nothing it holds the sequence, hands over the rest, and forgets it at the sink's
KVCommitted. Whatever else ends the hand-off lets the sequence go on here. Pure; docs/migration.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.durations import note_duration
from tandem.engine.contracts.wire.parts import Continuation, Message
from tandem.engine.contracts.wire.requests import Migrate, Migrated
from tandem.engine.scheduling.request import Request, RequestState
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import HandoffCompleted, SourceOutcome
from tandem.kv_connector.source.manager import SourceManager
from tandem.node.requests import RequestBook

# Room claimed beyond a sequence's length: it may grow by so much before its last block has been pushed.
GROWTH_BLOCKS = 2  # a guess
LEAST_GROWTH_TOKENS = 128  # a guess
# With so few full blocks left to push it is time to stand still.
LAST_ROUND_BLOCKS = 1  # a guess


@dataclass
class MigrationCounters:
    """What moves of running sequences to other nodes came to."""

    started: int = 0
    finished: int = 0
    failed: int = 0  # sequences that went on here
    tokens: int = 0  # the length of sequences that have left

    pauses: dict[str, float] = field(default_factory=lambda: {"migrations_pause_s": 0.0})  # how long they stood still

    def as_dict(self) -> dict[str, float]:
        numbers = {name: value for name, value in vars(self).items() if name != "pauses"}
        return {**{f"migrations_{name}": float(number) for name, number in numbers.items()}, **self.pauses}


@dataclass(eq=False, slots=True)
class Departure:
    """A sequence that leaves. `reason` is set when that has failed; the record stays until no transfer reads its
    blocks."""

    order: Migrate
    router: NodeKey
    request: Request
    most_tokens: int
    num_preemptions: int
    least_tokens: int  # known, before anything is pushed: what a launched step computes is there when its token is
    paused_at: float = 0.0
    is_handed_over: bool = False
    reason: str = ""

    @property
    def key(self) -> AttemptKey:
        return self.order.successor


class Departures:
    """The sequences that leave one node, as source. `advance` is called once a turn of the step loop, before a step is
    scheduled."""

    def __init__(self, source: SourceManager, scheduler: Scheduler, book: RequestBook) -> None:
        self.counters = MigrationCounters()
        self._source, self._scheduler, self._book = source, scheduler, book
        self._departures: dict[AttemptKey, Departure] = {}
        self._outbox: list[tuple[NodeKey, Message]] = []

    # --- events in ------------------------------------------------------------------------------------------

    def begin(self, router: NodeKey, order: Migrate, now: float) -> bool:
        """Begins to move a sequence. Returns whether its peer is needed now; False for a repetition, and for an order
        that is answered at once."""
        if order.successor in self._departures or self._source.knows(order.successor):
            return False
        entry = self._book.entries.get(order.key)
        request = self._scheduler.state.sequence_of(order.key, order.sample_index)
        problem = ""
        if entry is None or entry.router != router or request is None:
            problem = outcomes.UNKNOWN
        elif request.state is not RequestState.RUNNING or request.num_uncomputed_tokens > 1:
            problem = outcomes.NOT_DECODING
        elif order.num_tokens > request.num_tokens or any(d.request is request for d in self._departures.values()):
            problem = outcomes.UNKNOWN
        if problem or request is None:
            self._answer(router, order, problem)
            return False
        growth = max(GROWTH_BLOCKS * self._scheduler.state.block_size, LEAST_GROWTH_TOKENS)
        most_tokens = min(request.num_launched_tokens + growth, request.max_num_tokens)
        least_tokens = request.num_launched_tokens
        departure = Departure(order, router, request, most_tokens, request.num_preemptions, least_tokens)
        self._departures[order.successor] = departure
        self.counters.started += 1
        # A step that is under way may bring more than one token, and so may the next, which the loop launches in the
        # same turn: nobody looks here in between.
        room = min(most_tokens + 2 * self._scheduler.num_speculative_tokens, request.max_num_tokens)
        request.keep_blocks()
        first_kept = request.num_passed_blocks * self._scheduler.state.block_size
        self._source.follow(order.successor, order.peer, room, now + order.deadline_s, now, first_kept)
        return True

    def on_outcome(self, outcome: SourceOutcome, now: float) -> bool:
        """Takes the end of a hand-off; False if that was no running sequence's."""
        departure = self._departures.get(outcome.key)
        if departure is None:
            return False
        if isinstance(outcome, HandoffCompleted):
            self._leave(departure, now)
        else:
            self._stay(departure, outcome.reason)
        return True

    def advance(self, now: float) -> None:
        for departure in list(self._departures.values()):
            if not departure.reason:
                self._look(departure, now)
            if departure.reason and not self._source.holds_blocks(departure.key):
                departure.request.resume()
                del self._departures[departure.key]

    def drain_outbox(self) -> list[tuple[NodeKey, Message]]:
        outbox, self._outbox = self._outbox, []
        return outbox

    @property
    def is_idle(self) -> bool:
        return not self._departures

    def check_integrity(self) -> None:
        requests = [departure.request for departure in self._departures.values()]
        assert len(set(map(id, requests))) == len(requests), "a sequence leaves twice"
        for departure in self._departures.values():
            assert not departure.request.is_paused or departure.paused_at, "a sequence is held and nobody holds it"

    # --- inside ---------------------------------------------------------------------------------------------

    def _look(self, departure: Departure, now: float) -> None:
        request = departure.request
        if request.state is RequestState.FINISHED:
            self._cancel(departure, outcomes.ENDED, now)
        elif request.state is not RequestState.RUNNING or request.num_preemptions != departure.num_preemptions:
            self._cancel(departure, outcomes.PREEMPTED, now)
        elif not self._source.is_pushing(departure.key):
            if request.num_launched_tokens >= departure.most_tokens and not departure.is_handed_over:
                self._cancel(departure, outcomes.OUTGROWN, now)
        elif not departure.paused_at:
            self._push(departure, now)
        elif not request.num_in_flight:
            self._hand_over(departure, now)

    def _push(self, departure: Departure, now: float) -> None:
        """Pushes what is settled: the KV of all tokens that the host knows, but the newest, is complete and changes no
        more."""
        request, key = departure.request, departure.key
        must_stop = request.num_launched_tokens >= departure.most_tokens
        if not must_stop:
            if request.num_tokens < departure.least_tokens or not self._source.is_flushed(key):
                return
            num_blocks = self._source.push_settled(key, request.block_ids, request.num_tokens - 1, now)
            must_stop = num_blocks <= LAST_ROUND_BLOCKS
        if must_stop:
            request.pause()
            departure.paused_at = now

    def _hand_over(self, departure: Departure, now: float) -> None:
        """Hands over the rest. Every token of the sequence is known: none is in flight, and none is launched any
        more."""
        request = departure.request
        tail = tuple(request.known_token_ids(departure.order.num_tokens).tolist())
        continuation = Continuation(request.num_tokens - 1, tail)
        departure.is_handed_over = True
        self._source.hand_over(departure.key, request.block_ids, continuation, now)

    def _leave(self, departure: Departure, now: float) -> None:
        order, request = departure.order, departure.request
        self.counters.finished += 1
        self.counters.tokens += request.num_tokens
        note_duration(self.counters.pauses, "migrations_pause_s", now - departure.paused_at)
        del self._departures[departure.key]
        self._scheduler.state.abort(order.key, (order.sample_index,))
        self._book.sample_left(request.key, order.sample_index)
        self._answer(departure.router, order, "")

    def _stay(self, departure: Departure, reason: str) -> None:
        # One that was cancelled may have arrived, and its successor may be why.
        self.counters.failed += departure.request.state is not RequestState.FINISHED
        departure.reason = reason or outcomes.UNKNOWN
        self._answer(departure.router, departure.order, departure.reason)

    def _cancel(self, departure: Departure, reason: str, now: float) -> None:
        self._stay(departure, reason)
        self._source.cancel(departure.key, now)

    def _answer(self, router: NodeKey, order: Migrate, reason: str) -> None:
        answer = Migrated(
            request_id=order.request_id,
            attempt=order.attempt,
            sample_index=order.sample_index,
            successor=order.successor,
            reason=reason,
        )
        self._outbox.append((router, answer))
