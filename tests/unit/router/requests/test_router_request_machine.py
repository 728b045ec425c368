"""Every state × every event of the request machine, and random histories that must not lose or repeat a token."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.engine.contracts.errors import (
    ClientGoneError,
    DeadlineError,
    NodeFailedError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import PeerRef, TokenLogprobs
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancel,
    Cancelled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    TokenDelta,
)
from tandem.router.placing.placement import Placement
from tandem.router.requests.actions import (
    Action,
    EmitPromptLogprobs,
    EmitTokens,
    Fail,
    Finish,
    Place,
    RequestSpec,
    SendToNode,
)
from tandem.router.requests.machine import RequestMachine
from tandem.router.requests.parts import AttemptState, Sample

D, P, X = PeerRef("d", 1, "tcp://d"), PeerRef("p", 2, "tcp://p"), PeerRef("x", 3, "tcp://x")
DK, PK, XK = NodeKey("d", 1), NodeKey("p", 2), NodeKey("x", 3)
SPLIT = Placement(D, P, "test")
ALONE = Placement(X, None, "test")
PROMPT = np.arange(10, dtype=np.int32)
MAX_TOKENS = 4


def token(sample: int, index: int) -> int:
    return 100 * sample + index


def delta(
    index: int, count: int = 1, sample: int = 0, attempt: int = 1, request_id: str = "r", limit: int = MAX_TOKENS
) -> TokenDelta:
    ids = tuple(token(sample, i) for i in range(index, index + count))
    finish = "length" if index + count >= limit else None
    return TokenDelta(request_id, attempt, sample, index, ids, finish_reason=finish)


def make(num_samples: int = 1, max_attempts: int = 2, max_tokens: int = MAX_TOKENS, **sampling: int) -> RequestMachine:
    params = SamplingParams(max_tokens=max_tokens, seed=7, **sampling)
    return RequestMachine(RequestSpec("r", PROMPT, params, num_samples, max_attempts=max_attempts), now=0.0)


def failed(retryable: bool, code: str = "node_failed", attempt: int = 1) -> RequestFailed:
    return RequestFailed(request_id="r", attempt=attempt, code=code, message="m", retryable=retryable)


def sends(actions: list[Action], kind: type[Submit] | type[Cancel]) -> list[SendToNode]:
    return [a for a in actions if isinstance(a, SendToNode) and isinstance(a.message, kind)]


def test_cached_is_what_the_node_that_computes_the_prompt_found() -> None:
    m = make()
    m.placed("r", SPLIT, 0.0)
    m.accepted(DK, Accepted(request_id="r", attempt=1, num_cached_tokens=8), 0.0)
    m.tokens(PK, msgspec.structs.replace(delta(0), num_cached_tokens=3), 0.0)
    m.tokens(DK, msgspec.structs.replace(delta(1), num_cached_tokens=8), 0.0)
    assert m.num_cached_tokens == 3
    alone = make()
    alone.placed("r", ALONE, 0.0)
    alone.accepted(XK, Accepted(request_id="r", attempt=1, num_cached_tokens=8), 0.0)
    assert alone.num_cached_tokens == 8


# --- the table ------------------------------------------------------------------------------------------------


def _placed(m: RequestMachine) -> None:
    m.placed("r", SPLIT, 0.0)


def _prefilling(m: RequestMachine) -> None:
    _placed(m)
    for node in (DK, PK):
        m.accepted(node, Accepted(request_id="r", attempt=1), 0.0)


def _streaming(m: RequestMachine) -> None:
    _prefilling(m)
    m.tokens(PK, delta(0), 0.0)


def _handed_off(m: RequestMachine) -> None:
    _streaming(m)
    m.tokens(DK, delta(1), 0.0)


def _finished(m: RequestMachine) -> None:
    _handed_off(m)
    m.tokens(DK, delta(2, 2), 0.0)


SETUPS: dict[str, Callable[[RequestMachine], object]] = {
    "queued": lambda m: None,
    "placed": _placed,
    "prefilling": _prefilling,
    "streaming": _streaming,
    "handed_off": _handed_off,
    "finished": _finished,
    "failed": lambda m: m.abort(ClientGoneError("it left")),
}
START = {
    "queued": "Q",
    "placed": "PL",
    "prefilling": "PF",
    "streaming": "ST",
    "handed_off": "ST",
    "finished": "FI",
    "failed": "FA",
}
STATES = {
    "Q": AttemptState.QUEUED,
    "PL": AttemptState.PLACED,
    "PF": AttemptState.PREFILLING,
    "ST": AttemptState.STREAMING,
    "FI": AttemptState.FINISHED,
    "FA": AttemptState.FAILED,
}


def _accept_all(m: RequestMachine) -> list[Action]:
    accepted = Accepted(request_id="r", attempt=1)
    return m.accepted(DK, accepted, 0.0) + m.accepted(PK, accepted, 0.0)


EVENTS: dict[str, Callable[[RequestMachine], list[Action]]] = {
    "placed": lambda m: m.placed("r", SPLIT, 0.0),
    "placed elsewhere": lambda m: m.placed("unknown", SPLIT, 0.0),
    "accepted by one": lambda m: m.accepted(DK, Accepted(request_id="r", attempt=1), 0.0),
    "accepted by both": _accept_all,
    "first token": lambda m: m.tokens(PK, delta(0), 0.0),
    "second token": lambda m: m.tokens(DK, delta(1), 0.0),
    "all tokens": lambda m: m.tokens(DK, delta(0, MAX_TOKENS), 0.0),
    "late attempt": lambda m: m.tokens(DK, delta(0, MAX_TOKENS, attempt=0), 0.0),
    "token of a stranger": lambda m: m.tokens(XK, delta(0, MAX_TOKENS), 0.0),
    "token of no sample": lambda m: m.tokens(DK, delta(0, sample=5), 0.0),
    "prompt logprobs": lambda m: m.prompt_logprobs(DK, PromptLogprobs(request_id="r", attempt=1, entries=())),
    "decode node gives up": lambda m: m.request_failed(DK, failed(True), 0.0),
    "prefill node gives up": lambda m: m.request_failed(PK, failed(True), 0.0),
    "decode node refuses": lambda m: m.request_failed(DK, failed(False), 0.0),
    "late failure": lambda m: m.request_failed(DK, failed(False, attempt=0), 0.0),
    "decode node lost": lambda m: m.node_lost(DK, "gone", 0.0),
    "prefill node lost": lambda m: m.node_lost(PK, "gone", 0.0),
    "stranger lost": lambda m: m.node_lost(XK, "gone", 0.0),
    "cancel answered": lambda m: m.cancelled(DK, Cancelled(request_id="r", attempt=1)),
    "client gone": lambda m: m.abort(ClientGoneError("it left")),
    "stop string": lambda m: m.stop_sample(0),
    "early tick": lambda m: m.tick(1.0),
    "tick after 10 s": lambda m: m.tick(10.0),
    "tick at the deadline": lambda m: m.tick(600.0),
}

#                          queued placed prefilling streaming handed_off finished failed
TABLE = """
placed                   | PL | PL | PF | ST | ST | FI | FA
placed elsewhere         | Q  | PL | PF | ST | ST | FI | FA
accepted by one          | Q  | PL | PF | ST | ST | FI | FA
accepted by both         | Q  | PF | PF | ST | ST | FI | FA
first token              | Q  | ST | ST | ST | ST | FI | FA
second token             | Q  | PL | PF | ST | ST | FI | FA
all tokens               | Q  | FI | FI | FI | FI | FI | FA
late attempt             | Q  | PL | PF | ST | ST | FI | FA
token of a stranger      | Q  | PL | PF | ST | ST | FI | FA
token of no sample       | Q  | PL | PF | ST | ST | FI | FA
prompt logprobs          | Q  | PL | PF | ST | ST | FI | FA
decode node gives up     | Q  | Q  | Q  | Q  | Q  | FI | FA
prefill node gives up    | Q  | Q  | Q  | Q  | ST | FI | FA
decode node refuses      | Q  | FA | FA | FA | FA | FI | FA
late failure             | Q  | PL | PF | ST | ST | FI | FA
decode node lost         | Q  | Q  | Q  | Q  | Q  | FI | FA
prefill node lost        | Q  | Q  | Q  | Q  | ST | FI | FA
stranger lost            | Q  | PL | PF | ST | ST | FI | FA
cancel answered          | Q  | PL | PF | ST | ST | FI | FA
client gone              | FA | FA | FA | FA | FA | FI | FA
stop string              | FI | FI | FI | FI | FI | FI | FA
early tick               | Q  | PL | PF | ST | ST | FI | FA
tick after 10 s          | FA | Q  | PF | ST | ST | FI | FA
tick at the deadline     | FA | FA | FA | FA | FA | FI | FA
"""
ROWS = {row.split("|")[0].strip(): [c.strip() for c in row.split("|")[1:]] for row in TABLE.strip().splitlines()}


def test_the_table_is_complete() -> None:
    assert set(ROWS) == set(EVENTS)
    assert all(len(row) == len(SETUPS) for row in ROWS.values())


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("setup", SETUPS)
def test_state_and_event(setup: str, event: str) -> None:
    machine = make()
    SETUPS[setup](machine)
    assert machine.state is STATES[START[setup]]
    before = set(machine.attempts.live["r"].nodes) if machine.attempts.live else set()
    attempts_before = machine.attempts.highest_number
    actions = EVENTS[event](machine)
    machine.check_integrity()
    after = ROWS[event][list(SETUPS).index(setup)]
    assert machine.state is STATES[after]
    ends = [a for a in actions if isinstance(a, Finish | Fail)]
    newly_ended = after in ("FI", "FA") and START[setup] not in ("FI", "FA")
    assert len(ends) == newly_ended
    if START[setup] in ("FI", "FA"):
        assert actions == []
    if machine.attempts.highest_number > attempts_before or (newly_ended and event not in ("all tokens",)):
        gone = {"decode node": {DK}, "prefill node": {PK}}.get(
            event.rsplit(" ", 2 if "gives" in event else 1)[0], set()
        )
        assert {send.node for send in sends(actions, Cancel)} == before - gone


# --- what single events do --------------------------------------------------------------------------------------


def test_both_nodes_are_told_at_once_and_about_each_other() -> None:
    machine = make(min_tokens=2)
    decode, prefill = sends(machine.placed("r", SPLIT, 1.0), Submit)
    assert (decode.node, decode.message.mode, decode.message.peer) == (DK, "decode", P)
    assert (prefill.node, prefill.message.mode, prefill.message.peer) == (PK, "prefill", D)
    for message in (decode.message, prefill.message):
        assert message.prompt_token_ids == PROMPT.astype("<i4").tobytes()
        assert message.sampling.seed == 7
        assert message.sampling.min_tokens == 2
        assert message.deadline_s == 599.0
    (alone,) = sends(make().placed("r", ALONE, 0.0), Submit)
    assert (alone.message.mode, alone.message.peer) == ("full", None)


def test_next_attempt_continues_after_what_was_emitted() -> None:
    machine = make()
    _handed_off(machine)
    actions = machine.node_lost(DK, "gone", 5.0)
    assert [a for a in actions if isinstance(a, Place)] == [Place("r")]
    assert machine.attempts.live["r"].avoid == {DK}
    assert machine.prompt_of("r").tolist() == [*range(10), 0, 1]
    (submit,) = sends(machine.placed("r", ALONE, 5.0), Submit)
    assert submit.message.attempt == 2
    assert submit.message.num_prior_output_tokens == 2
    assert submit.message.sampling.max_tokens == MAX_TOKENS
    assert machine.tokens(DK, delta(2), 6.0) == []  # the old attempt's node comes back to life
    assert machine.num_dropped_deltas == 1
    emitted, finish = machine.tokens(XK, delta(2, 2, attempt=2), 6.0)
    assert isinstance(emitted, EmitTokens)
    assert emitted.token_ids == (2, 3)
    assert finish == Finish()


def test_samples_continue_one_by_one_after_a_failure() -> None:
    machine = make(num_samples=3)
    machine.placed("r", ALONE, 0.0)
    machine.tokens(XK, delta(0, 4, sample=0), 0.0)  # finished
    machine.tokens(XK, delta(0, 2, sample=1), 0.0)
    actions = machine.node_lost(XK, "gone", 1.0)  # sample 2 has nothing yet
    assert [a.request_id for a in actions if isinstance(a, Place)] == ["r-s1", "r-s2"]
    one = sends(machine.placed("r-s1", SPLIT, 1.0), Submit)[0].message
    two = sends(machine.placed("r-s2", ALONE, 1.0), Submit)[0].message
    assert (one.sample_indices, one.num_prior_output_tokens) == ((1,), 2)
    assert (two.sample_indices, two.num_prior_output_tokens) == ((2,), 0)
    assert len(one.prompt_token_ids) == 4 * 12
    assert len(two.prompt_token_ids) == 4 * 10
    machine.check_integrity()
    assert machine.tokens(DK, delta(2, 2, sample=1, attempt=2, request_id="r-s1"), 1.0)[-1] != Finish()
    assert machine.tokens(XK, delta(0, 4, sample=2, attempt=2, request_id="r-s2"), 1.0)[-1] == Finish()


def test_samples_stay_together_while_nothing_was_emitted() -> None:
    machine = make(num_samples=3)
    machine.placed("r", SPLIT, 0.0)
    machine.request_failed(PK, failed(True), 0.0)
    (submit,) = sends(machine.placed("r", ALONE, 0.0), Submit)
    assert submit.message.attempt == 2
    assert submit.message.sample_indices == (0, 1, 2)


def test_no_attempt_is_left() -> None:
    machine = make(max_attempts=2)
    for _ in range(2):
        machine.placed("r", ALONE, 0.0)
        actions = machine.node_lost(XK, "gone", 0.0)
    assert isinstance(actions[-1], Fail)
    assert isinstance(actions[-1].error, NodeFailedError)


@pytest.mark.parametrize(("code", "kind"), [("overloaded", OverloadedError), ("draining", UnavailableError)])
def test_being_turned_away_costs_time_and_no_attempt(code: str, kind: type[TandemError]) -> None:
    machine = make(max_attempts=2)
    now, number = 0.0, 0
    while now < 9.5:
        number += 1
        machine.placed("r", ALONE, now)
        assert machine.request_failed(XK, failed(True, code, attempt=number), now) == [Place("r")]
        assert not machine.attempts.live["r"].avoid, "it may have room by then"
        backs_off = code == "overloaded"
        assert machine.attempts.may_be_placed("r", now) != backs_off
        assert (machine.tick(now + 0.1) == []) == backs_off
        now += 0.3
        assert machine.tick(now) == [Place("r")]
    assert number > 30
    (fail,) = machine.tick(10.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, kind)


def test_failures_count_though_a_node_was_full_in_between() -> None:
    machine = make(max_attempts=2)
    machine.placed("r", ALONE, 0.0)
    machine.node_lost(XK, "gone", 9.0)
    machine.placed("r", ALONE, 9.0)
    machine.request_failed(XK, failed(True, "overloaded", attempt=2), 9.0)
    assert machine.tick(18.0) == [Place("r")], "it waits since it lost its node"
    assert machine.attempts.live["r"].avoid == {XK}
    machine.placed("r", ALONE, 18.0)
    assert isinstance(machine.node_lost(XK, "gone", 18.0)[-1], Fail)


@pytest.mark.parametrize(("reporter", "lost"), [(PK, DK), (DK, PK)])
def test_a_node_that_lost_the_other_one_is_not_avoided(reporter: NodeKey, lost: NodeKey) -> None:
    machine = make()
    _prefilling(machine)
    machine.request_failed(reporter, failed(True, "peer_lost"), 0.0)
    assert machine.attempts.live["r"].avoid == {lost}


def test_a_node_that_lost_help_is_not_avoided_and_gets_none() -> None:
    machine = make(max_attempts=3)
    _prefilling(machine)
    assert not machine.attempts.live["r"].goes_alone
    machine.request_failed(PK, failed(True, "help_lost"), 0.0)
    following = machine.attempts.live["r"]
    assert (following.avoid, following.goes_alone, following.num_failures) == (set(), True, 1)
    machine.placed("r", SPLIT, 0.0)
    machine.request_failed(PK, failed(True, attempt=2), 0.0)
    assert machine.attempts.live["r"].goes_alone, "and so do those behind it"


def test_errors_of_the_deadlines() -> None:
    queued, running = make(), make()
    (fail,) = queued.tick(10.0)
    assert isinstance(fail, Fail)
    assert isinstance(fail.error, UnavailableError)
    _streaming(running)
    actions = running.tick(600.0)
    assert isinstance(actions[-1], Fail)
    assert isinstance(actions[-1].error, DeadlineError)


def test_a_stop_string_in_one_of_two_samples_cancels_that_sample_only() -> None:
    machine = make(num_samples=2)
    machine.placed("r", ALONE, 0.0)
    machine.tokens(XK, delta(0, sample=0), 0.0)
    (one,) = sends(machine.stop_sample(0), Cancel)
    assert one.message.sample_indices == (0,)
    actions = machine.stop_sample(1)
    (whole,) = sends(actions, Cancel)
    assert whole.message.sample_indices == ()
    assert actions[-1] == Finish()
    assert not machine.closed
    machine.cancelled(XK, Cancelled(request_id="r", attempt=1))
    assert machine.closed


def test_a_prefill_node_that_dies_before_its_token_came_is_missed() -> None:
    machine = make()
    _prefilling(machine)
    assert machine.tokens(DK, delta(1), 0.0) == []  # handed over, but the first token is still on the way
    assert machine.work_on(PK) == {("r", 1)}
    assert Place("r") in machine.node_lost(PK, "gone", 0.0)
    assert machine.prompt_of("r").tolist() == PROMPT.tolist()
    assert machine.work_on(DK) == {("r", 1)}, "its cancel is not yet answered"


@pytest.mark.parametrize("lost", [0, 1])
def test_tokens_that_never_come_are_made_again(lost: int) -> None:
    """The prefill node's first one, or one in the middle: those behind it don't end the request."""
    m = make(max_tokens=6)
    _prefilling(m)
    if lost:
        m.tokens(PK, delta(0, limit=6), 1.0)
    m.tokens(DK, delta(lost + 1, limit=6), 1.0)
    m.tokens(DK, delta(lost + 2, 4 - lost, limit=6), 9.0)
    assert not m.tick(1.0 + m.spec.accept_s - 0.1)
    actions = m.tick(1.0 + m.spec.accept_s)
    assert {each.node for each in sends(actions, Cancel)} == {DK, PK}
    assert Place("r") in actions
    assert not m.attempts.live["r"].avoid
    (submit,) = sends(m.placed("r", ALONE, 12.0), Submit)
    assert submit.message.num_prior_output_tokens == lost
    emitted = m.tokens(XK, delta(lost, 6 - lost, attempt=2, limit=6), 13.0)
    assert [each.token_ids for each in emitted if isinstance(each, EmitTokens)] == [tuple(range(lost, 6))]
    assert isinstance(m.outcome, Finish)


def test_a_lost_node_needs_not_answer_its_cancel() -> None:
    machine = make()
    _handed_off(machine)
    machine.abort(ClientGoneError("it left"))
    machine.cancelled(PK, Cancelled(request_id="r", attempt=1))
    assert not machine.closed
    machine.node_lost(DK, "gone", 0.0)
    assert machine.closed


def test_prompt_logprobs_are_asked_for_until_they_came_once() -> None:
    machine = make(num_prompt_logprobs=1)
    entries = (TokenLogprobs((1,), (-0.5,)),)
    submit = sends(machine.placed("r", ALONE, 0.0), Submit)[0].message
    assert submit.sampling.num_prompt_logprobs == 1
    message = PromptLogprobs(request_id="r", attempt=1, entries=entries)
    assert machine.prompt_logprobs(XK, message) == [EmitPromptLogprobs(entries)]
    assert machine.prompt_logprobs(XK, message) == []
    machine.node_lost(XK, "gone", 0.0)
    submit = sends(machine.placed("r", ALONE, 0.0), Submit)[0].message
    assert submit.sampling.num_prompt_logprobs is None


def test_overshoot_beyond_max_tokens_is_cut() -> None:
    machine = make()
    machine.placed("r", ALONE, 0.0)
    emitted, finish = machine.tokens(XK, delta(0, 7, limit=99), 0.0)
    assert isinstance(emitted, EmitTokens)
    assert emitted.token_ids == (0, 1, 2, 3)
    assert emitted.finish_reason == "length"
    assert finish == Finish()


# --- random histories -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_histories_end_once_with_every_token_once(data: st.DataObject) -> None:
    num_samples, max_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 6))
    machine = make(num_samples, max_attempts=4, max_tokens=max_tokens)
    out: list[list[int]] = [[] for _ in range(num_samples)]
    ends: list[Action] = []

    def note(actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, EmitTokens):
                out[action.sample_index] += action.token_ids
            elif isinstance(action, Finish | Fail):
                ends.append(action)
        machine.check_integrity()

    names = ["r", *(f"r-s{i}" for i in range(num_samples))]
    nodes = [DK, PK, XK]

    def step() -> None:
        kind = data.draw(st.sampled_from(["place", "tokens", "tokens", "tokens", "fail", "lost", "accept", "tick"]))
        name, node, number = (
            data.draw(st.sampled_from(names)),
            data.draw(st.sampled_from(nodes)),
            data.draw(st.integers(1, 4)),
        )
        if kind == "place" and name in machine.attempts.live:
            note(machine.placed(name, data.draw(st.sampled_from([SPLIT, ALONE])), 0.0))
        elif kind == "tokens":
            index, sample = data.draw(st.integers(0, max_tokens - 1)), data.draw(st.integers(0, num_samples - 1))
            count = data.draw(st.integers(1, max_tokens - index))
            note(machine.tokens(node, delta(index, count, sample, number, name, limit=max_tokens), 0.0))
        elif kind == "fail" and data.draw(st.booleans()):
            message = RequestFailed(request_id=name, attempt=number, code="c", message="m", retryable=True)
            note(machine.request_failed(node, message, 0.0))
        elif kind == "lost" and data.draw(st.booleans()):
            note(machine.node_lost(node, "gone", 0.0))
        elif kind == "accept":
            note(machine.accepted(node, Accepted(request_id=name, attempt=number), 0.0))
        elif kind == "tick":
            note(machine.tick(0.5))

    for _ in range(data.draw(st.integers(0, 40))):
        step()
        for i, ids in enumerate(out):
            assert ids == [token(i, k) for k in range(len(ids))], "a token was lost, repeated or out of order"
    for _ in range(20):  # from every reachable state an end can be reached
        for name, attempt in list(machine.attempts.live.items()):
            note(machine.placed(name, ALONE, 0.0))
            for sample in attempt.sample_indices:
                node = attempt.primary or XK
                note(machine.tokens(node, delta(0, max_tokens, sample, attempt.number, name, limit=max_tokens), 0.0))
    assert len(ends) == 1
    if isinstance(ends[0], Finish):
        assert out == [[token(i, k) for k in range(max_tokens)] for i in range(num_samples)]


def test_of_what_came_early_twice_the_longer_is_kept() -> None:
    """As of a sample that moved: one node was cut short, the other repeats what it may not have sent."""
    sample = Sample()
    for token_ids in ((5,), (5, 6, 7), (5, 6)):
        assert sample.take(TokenDelta("r", 1, 0, 2, token_ids), 9, 0.0) == []
    assert [each.token_ids for each in sample.take(TokenDelta("r", 1, 0, 0, (3, 4)), 9, 0.0)] == [(3, 4), (5, 6, 7)]
    assert sample.token_ids == [3, 4, 5, 6, 7]
