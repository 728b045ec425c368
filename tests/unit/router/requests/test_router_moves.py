"""Running samples that move between nodes, as the request machine sees it: who makes the tokens, whatever happens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.errors import ClientGoneError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import PeerRef, TokenLogprobs
from tandem.engine.contracts.wire.requests import (
    Cancel,
    Cancelled,
    Migrate,
    Migrated,
    RequestFailed,
    Submit,
    TokenDelta,
)
from tandem.router.placing.placement import Placement
from tandem.router.requests.actions import Action, EmitTokens, Fail, Finish, Moved, Place, RequestSpec, SendToNode
from tandem.router.requests.machine import RequestMachine

D, E, X = PeerRef("d", 1, "tcp://d"), PeerRef("e", 2, "tcp://e"), PeerRef("x", 3, "tcp://x")
DK, EK, XK = NodeKey("d", 1), NodeKey("e", 2), NodeKey("x", 3)
PROMPT = np.arange(10, dtype=np.int32)
MAX_TOKENS = 12


def delta(index: int, count: int = 1, sample: int = 0, attempt: int = 1, name: str = "r") -> TokenDelta:
    ids = tuple(100 * sample + i for i in range(index, index + count))
    return TokenDelta(
        name, attempt, sample, index, ids, finish_reason="length" if index + count >= MAX_TOKENS else None
    )


def streaming(num_samples: int = 1, num_tokens: int = 3, **sampling: int) -> RequestMachine:
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=7, **sampling)
    machine = RequestMachine(RequestSpec("r", PROMPT, params, num_samples), now=0.0)
    machine.placed("r", Placement(D, None, "test"), 0.0)
    for sample in range(num_samples):
        machine.tokens(DK, delta(0, num_tokens, sample), 1.0)
    return machine


def move(machine: RequestMachine, sample: int = 0) -> tuple[Submit, Migrate]:
    first, second = machine.move(sample, D, E, 2.0, 10.0)
    assert (first.node, second.node) == (EK, DK)  # type: ignore[union-attr]
    return first.message, second.message  # type: ignore[union-attr,return-value]


def left(order: Migrate, reason: str = "") -> Migrated:
    return Migrated(
        request_id=order.request_id, attempt=order.attempt, sample_index=order.sample_index, successor=order.successor,
        reason=reason,
    )  # fmt: skip


def emitted(actions: list[Action]) -> list[int]:
    return [token for action in actions if isinstance(action, EmitTokens) for token in action.token_ids]


def sent(actions: list[Action], kind: type) -> list[tuple[tuple[str, int], object]]:
    return [(a.node, a.message) for a in actions if isinstance(a, SendToNode) and isinstance(a.message, kind)]


def test_both_nodes_are_told_and_the_successor_gets_what_the_client_has_seen() -> None:
    machine = streaming()
    submit, order = move(machine)
    assert (submit.mode, submit.is_running, submit.peer, submit.attempt) == ("decode", True, D, 2)
    assert np.frombuffer(submit.prompt_token_ids, "<i4").tolist() == [*range(10), 0, 1, 2]
    assert submit.num_prior_output_tokens == 3
    assert (order.attempt, order.successor, order.num_tokens, order.peer) == (1, ("r", 2), 13, E)
    assert order.deadline_s == 5.0, "the old node gives up before its router does"
    assert machine.moves.movable(DK, 3.0) == [], "it moves already"


def test_old_tokens_count_until_the_successor_speaks_and_doubles_are_dropped() -> None:
    machine = streaming()
    _, order = move(machine)
    assert emitted(machine.tokens(DK, delta(3, 2), 2.1)) == [3, 4]
    actions = machine.tokens(EK, delta(3, 4, attempt=2), 2.2)
    assert emitted(actions) == [5, 6]
    assert Moved(0) in actions
    assert sent(actions, Cancel) == [(DK, Cancel(request_id="r", attempt=1))]
    assert machine.tokens(DK, delta(5, 1), 2.3) == [], "the old node has nothing to say any more"
    assert machine.migrated(DK, left(order), 2.4) == []
    assert machine.node_lost(DK, "drained", 2.5) == []
    assert emitted(machine.tokens(EK, delta(7, 5, attempt=2), 3.0)) == [7, 8, 9, 10, 11]
    assert isinstance(machine.outcome, Finish)


def test_a_gap_waits_for_the_old_node() -> None:
    """With log-probabilities the successor does not repeat tokens: those of the old node may come after its own."""
    machine = streaming(num_logprobs=0)
    _, order = move(machine)
    assert machine.tokens(EK, delta(5, 1, attempt=2), 2.1) == []
    assert emitted(machine.tokens(DK, delta(3, 2), 2.2)) == [3, 4, 5]
    assert Moved(0) in machine.migrated(DK, left(order), 2.3)
    assert emitted(machine.tokens(EK, delta(6, 1, attempt=2), 2.4)) == [6]


def test_a_gap_that_nobody_fills_costs_a_new_attempt() -> None:
    machine = streaming(num_logprobs=0)
    move(machine)
    machine.tokens(EK, delta(5, 1, attempt=2), 2.1)
    actions = machine.node_lost(DK, "it died", 2.2)
    assert Place("r") in actions
    assert sent(actions, Cancel) == [(EK, Cancel(request_id="r", attempt=2))]
    machine.placed("r", Placement(E, None, "test"), 2.3)
    assert emitted(machine.tokens(EK, delta(3, 1, attempt=3), 2.4)) == [3], "no node knows that attempt's number"


def test_a_successor_that_fails_costs_nothing() -> None:
    refusal = RequestFailed(request_id="r", attempt=2, code="handoff_failed", message="full", retryable=True)
    for fail in (
        lambda m, order: m.request_failed(EK, refusal, 2.1),
        lambda m, order: m.node_lost(EK, "it died", 2.1),
        lambda m, order: m.migrated(DK, left(order, "preempted"), 2.1),
        lambda m, order: m.tick(12.1),
    ):
        machine = streaming()
        _, order = move(machine)
        actions = fail(machine, order)
        assert not [a for a in actions if isinstance(a, Fail | Place)]
        assert not sent(actions, Cancel) or sent(actions, Cancel) == [(EK, Cancel(request_id="r", attempt=2))]
        assert not machine.moves.under_way
        assert emitted(machine.tokens(DK, delta(3, 9), 13.0)) == list(range(3, 12))
        assert isinstance(machine.outcome, Finish)


def test_a_sample_that_left_for_a_successor_given_up_is_computed_again() -> None:
    machine = streaming()
    _, order = move(machine)
    machine.tick(12.1)
    assert Place("r") in machine.migrated(DK, left(order), 12.2)


def test_a_contradiction_ends_the_successor() -> None:
    machine = streaming()
    move(machine)
    machine.tokens(DK, delta(3, 2), 2.1)
    actions = machine.tokens(EK, TokenDelta("r", 2, 0, 3, (3, 99)), 2.2)
    assert emitted(actions) == []
    assert Place("r") in actions


def test_samples_of_one_prompt_leave_one_by_one() -> None:
    machine = streaming(num_samples=2)
    submit, order = move(machine, 1)
    assert (submit.request_id, order.successor, order.request_id) == ("r-s1", ("r-s1", 2), "r")
    actions = machine.migrated(DK, left(order), 2.1)
    assert sent(actions, Cancel) == [(DK, Cancel(request_id="r", attempt=1, sample_indices=(1,)))]
    machine.check_integrity()
    assert emitted(machine.tokens(DK, delta(3, 1), 2.2)) == [3]
    assert emitted(machine.tokens(EK, delta(3, 1, 1, 2, "r-s1"), 2.2)) == [103]
    submit, order = move(machine, 0)
    assert submit.request_id == "r"
    machine.migrated(DK, left(order), 2.3)
    assert sorted(machine.attempts.live) == ["r", "r-s1"]
    machine.check_integrity()


def test_an_end_ends_the_successor_too() -> None:
    for end in (
        lambda m: m.abort(ClientGoneError("it left")),
        lambda m: m.tokens(DK, delta(3, 9), 2.1),
        lambda m: m.stop_sample(0),
    ):
        machine = streaming()
        move(machine)
        actions = end(machine)
        assert (EK, Cancel(request_id="r", attempt=2)) in sent(actions, Cancel)
        assert machine.outcome is not None
        machine.check_integrity()


class Nodes:
    """Three nodes that make the right tokens, a network that keeps the order of each link, and moves between them.
    A node that gives a sample away makes no more of it; a move may also come to nothing at any moment."""

    def __init__(self, with_logprobs: bool) -> None:
        logprobs = {"num_logprobs": 0} if with_logprobs else {}
        self.with_logprobs = with_logprobs
        params = SamplingParams(max_tokens=MAX_TOKENS, **logprobs)
        self.machine = RequestMachine(RequestSpec("r", PROMPT, params, max_attempts=50), now=0.0)
        self.refs = {ref.node_id: ref for ref in (D, E, X)}
        self.links: dict[str, list[object]] = {name: [] for name in self.refs}
        self.running: dict[tuple[str, str, int], int] = {}  # (node, request, attempt) -> next output index
        self.orders: dict[tuple[str, str, int], Migrate] = {}  # by the sequence that is to leave
        self.output: list[int] = []
        self.do([Place("r")])

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, EmitTokens):
                self.output += action.token_ids
            elif isinstance(action, Place):
                self.do(self.machine.placed(action.request_id, Placement(D, None, "test"), 1.0))
            elif isinstance(action, SendToNode):
                self.hear(action.node[0], action.message)
        self.machine.check_integrity()

    def hear(self, node: str, message: object) -> None:
        if isinstance(message, Submit):
            key = (node, message.request_id, message.attempt)
            if not message.is_running:
                self.running[key] = message.num_prior_output_tokens
        elif isinstance(message, Migrate):
            self.orders[node, message.request_id, message.attempt] = message
        elif isinstance(message, Cancel):
            self.running.pop((node, message.request_id, message.attempt), None)
            self.orders.pop((node, message.request_id, message.attempt), None)
            answer = Cancelled(request_id=message.request_id, attempt=message.attempt)
            self.links[node].append(answer)

    def make(self, key: tuple[str, str, int]) -> None:
        index = self.running[key]
        if index < MAX_TOKENS:
            self.running[key] = index + 1
            self.links[key[0]].append(self._delta(key, index, index + 1))

    def _delta(self, key: tuple[str, str, int], first: int, end: int) -> TokenDelta:
        entries = tuple(TokenLogprobs((i,), (0.0,)) for i in range(first, end)) if self.with_logprobs else None
        finish = "length" if end >= MAX_TOKENS else None
        return TokenDelta(key[1], key[2], 0, first, tuple(range(first, end)), finish, logprobs=entries)

    def end_move(self, key: tuple[str, str, int], succeeds: bool) -> None:
        order = self.orders.pop(key)
        if succeeds and key in self.running:
            index = self.running.pop(key)
            new = (order.peer.node_id, *order.successor)
            self.running[new] = index
            first = order.num_tokens - len(PROMPT)
            if not self.with_logprobs and first < index:
                self.links[new[0]].append(self._delta(new, first, index))
            self.links[key[0]].append(left(order))
        else:
            self.links[key[0]].append(left(order, "full"))

    def deliver(self, name: str) -> None:
        message, key = self.links[name].pop(0), (name, self.refs[name].epoch)
        if isinstance(message, TokenDelta):
            self.do(self.machine.tokens(key, message, 1.0))
        elif isinstance(message, Cancelled):
            self.do(self.machine.cancelled(key, message))
        else:
            self.do(self.machine.migrated(key, message, 1.0))  # type: ignore[arg-type]

    def lose(self, name: str) -> None:
        self.links[name].clear()
        self.running = {key: index for key, index in self.running.items() if key[0] != name}
        self.orders = {key: order for key, order in self.orders.items() if key[0] != name}
        old, self.refs[name] = self.refs[name], PeerRef(name, self.refs[name].epoch + 10, f"tcp://{name}")
        self.do(self.machine.node_lost(NodeKey(name, old.epoch), "it died", 1.0))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_moves_lose_and_double_nothing(data: st.DataObject) -> None:
    nodes = Nodes(data.draw(st.booleans()))
    machine = nodes.machine
    for _ in range(400):
        if machine.outcome is not None:
            break
        choices = [("make", key) for key in nodes.running] + [("deliver", n) for n, link in nodes.links.items() if link]
        choices += [("end", key) for key in nodes.orders]
        movable = [ref for ref in nodes.refs.values() if machine.moves.movable((ref.node_id, ref.epoch), 5.0)]
        choices += [("move", ref.node_id) for ref in movable]
        choices += [("give_up", "")] if machine.moves.under_way else []
        choices += [("lose", name) for name in ("e", "x")]
        kind, subject = data.draw(st.sampled_from(choices))
        if kind == "make":
            nodes.make(subject)
        elif kind == "deliver":
            nodes.deliver(subject)
        elif kind == "end":
            nodes.end_move(subject, data.draw(st.booleans()))
        elif kind == "move":
            source = nodes.refs[subject]
            target = data.draw(st.sampled_from([ref for ref in nodes.refs.values() if ref is not source]))
            nodes.do(machine.move(0, source, target, 1.0, 10.0))
        elif kind == "give_up":
            nodes.do(machine.tick(11.5))
        else:
            nodes.lose(subject)
        machine.moves.not_before = 0.0
    for _ in range(200):  # undisturbed, it ends
        if machine.outcome is not None:
            break
        for key in list(nodes.orders):
            nodes.end_move(key, succeeds=True)
        for key in list(nodes.running):
            nodes.make(key)
        for name in nodes.links:
            while nodes.links[name]:
                nodes.deliver(name)
    assert isinstance(machine.outcome, Finish), machine.attempts.live
    assert nodes.output == list(range(MAX_TOKENS))
