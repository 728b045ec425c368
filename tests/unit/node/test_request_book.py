"""RequestBook: every accepted request ends exactly once, whatever comes twice, late or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import PeerRef, PrefixHint, TokenLogprobs
from tandem.engine.contracts.wire.requests import (
    Accepted,
    Cancelled,
    PromptLogprobs,
    RequestFailed,
    Submit,
    TokenDelta,
    Tokens,
)
from tandem.engine.scheduling.request import FailedEvent, PromptLogprobsEvent, TokensEvent
from tandem.node.requests import AcceptedRequest, RequestBook

ROUTER = NodeKey("router-a", 1)
OTHER = "router-b@0000000000000002"


def submit(request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), **fields: object) -> Submit:
    tokens = np.array(prompt, "<i4").tobytes()
    fields = {"attempt": 0, "mode": "full", "prompt_token_ids": tokens, "sampling": SamplingParams(), **fields}
    return Submit(request_id=request_id, **fields)  # type: ignore[arg-type]


def token(entry: AcceptedRequest, index: int, sample: int = 0, finish: str | None = None) -> TokensEvent:
    return TokensEvent(entry.request, sample, index, (10 + index,), finish)  # type: ignore[arg-type]


@dataclass
class Opened:
    book: RequestBook

    def open(self, request_id: str = "r", router: str = ROUTER, now: float = 0.0, **fields: object) -> AcceptedRequest:
        entry = self.book.open(router, submit(request_id, **fields), now)  # type: ignore[arg-type]
        assert entry is not None
        self.book.accept(entry)
        self.book.drain_outbox()
        return entry


@pytest.fixture
def book():  # type: ignore[no-untyped-def]
    book = RequestBook(vocab_size=100, max_model_len=32)
    yield book
    book.check_integrity()


def test_a_duplicate_submit_is_answered_and_not_run_again(book: RequestBook) -> None:
    entry = book.open(ROUTER, submit(), 0.0)
    assert entry is not None
    book.accept(entry, num_cached_tokens=16)
    assert book.open(ROUTER, submit(), 1.0) is None
    accepted = Accepted(request_id="r", attempt=0, num_cached_tokens=16)
    assert book.drain_outbox() == [(ROUTER, accepted)] * 2
    assert (book.num_accepted, len(book.entries)) == (1, 1)


def test_a_submit_after_the_end_is_answered_and_not_run_again(book: RequestBook) -> None:
    entry = Opened(book).open()
    book.on_events([token(entry, 0, finish="length")])
    assert not book.entries
    book.drain_outbox()
    assert book.open(ROUTER, submit(), 1.0) is None
    assert book.drain_outbox() == [(ROUTER, Accepted(request_id="r", attempt=0))]
    assert book.num_ended == 1
    assert book.open(ROUTER, submit(attempt=1), 1.0) is not None


def test_a_cancel_that_overtakes_its_submit(book: RequestBook) -> None:
    assert book.cancel_samples(ROUTER, AttemptKey("r", 0), ()) == (None, False)
    assert book.open(ROUTER, submit(), 0.0) is None
    assert [type(message) for _, message in book.drain_outbox()] == [Cancelled, Accepted]
    assert book.num_accepted == 0


@pytest.mark.parametrize("state", ["lives", "has ended", "was cancelled before it came"])
def test_a_name_that_another_router_has_used_is_refused(book: RequestBook, state: str) -> None:
    """An Accepted would be the last that it hears: the tokens go to the other, or have gone."""
    key, opened = AttemptKey("r", 0), Opened(book)
    if state != "was cancelled before it came":
        opened.open()
    if state != "lives":
        book.cancel_samples(ROUTER, key, ())
    book.drain_outbox()
    assert book.open(OTHER, submit(), 1.0) is None  # type: ignore[arg-type]
    [(router, failed)] = book.drain_outbox()
    assert router == OTHER
    assert isinstance(failed, RequestFailed)
    assert (failed.code, failed.retryable) == ("name_taken", True)
    assert book.open(ROUTER, submit(), 1.0) is None
    assert book.drain_outbox() == [(ROUTER, Accepted(request_id="r", attempt=0))], "its own is a duplicate still"
    opened.open(router=OTHER, attempt=1)


def test_what_another_router_cancels_goes_on(book: RequestBook) -> None:
    key, entry = AttemptKey("r", 0), Opened(book).open()
    assert book.cancel_samples(OTHER, key, ()) == (None, False)  # type: ignore[arg-type]
    assert book.drain_outbox() == [(OTHER, Cancelled(request_id="r", attempt=0))]
    assert book.entries == {key: entry}
    assert book.cancel_samples(ROUTER, key, ()) == (entry, True)
    book.cancel_samples(OTHER, key, ())  # type: ignore[arg-type]
    book.drain_outbox()
    assert book.open(ROUTER, submit(), 1.0) is None
    assert book.drain_outbox() == [(ROUTER, Accepted(request_id="r", attempt=0))]


def test_older_attempts_are_the_same_routers(book: RequestBook) -> None:
    opened = Opened(book)
    first, _, second = opened.open(), opened.open(router=OTHER, attempt=1), opened.open(attempt=2)
    newest = opened.open(attempt=7)
    assert book.older_attempts(newest) == [first, second]


def test_cancel_is_idempotent_and_ends_once(book: RequestBook) -> None:
    entry = Opened(book).open()
    assert book.cancel_samples(ROUTER, AttemptKey("r", 0), ()) == (entry, True)
    assert book.cancel_samples(ROUTER, AttemptKey("r", 0), ()) == (None, False)
    book.on_events([token(entry, 0), FailedEvent(entry.request, "x", "late", retryable=True)])
    assert book.fail(AttemptKey("r", 0), "x", "late", retryable=True) is None
    book.prompt_left(AttemptKey("r", 0))
    assert book.expired(1e9) == []
    assert book.drain_outbox() == [(ROUTER, Cancelled(request_id="r", attempt=0))] * 2
    assert book.num_ended == 1


def test_cancel_of_samples_one_by_one(book: RequestBook) -> None:
    entry = Opened(book).open(sample_indices=(0, 1, 2))
    assert book.cancel_samples(ROUTER, AttemptKey("r", 0), (1,)) == (entry, False)
    book.on_events([token(entry, 0, sample) for sample in (0, 1, 2)])
    (_, cancelled), (_, tokens) = book.drain_outbox()
    assert cancelled == Cancelled(request_id="r", attempt=0, sample_indices=(1,))
    assert isinstance(tokens, Tokens)
    assert [delta.sample_index for delta in tokens.deltas] == [0, 2]
    book.on_events([token(entry, 1, 0, "stop")])
    assert book.cancel_samples(ROUTER, AttemptKey("r", 0), (2,)) == (entry, True)


def test_all_tokens_of_a_drain_are_one_message_a_router(book: RequestBook) -> None:
    opened = Opened(book)
    mine, also_mine, theirs = opened.open("a"), opened.open("b"), opened.open("c", OTHER)
    book.on_events([token(mine, 0), token(theirs, 0), token(also_mine, 0), token(mine, 1)])
    out = dict(book.drain_outbox())
    assert [(d.request_id, d.output_index) for d in out[ROUTER].deltas] == [("a", 0), ("b", 0), ("a", 1)]  # type: ignore[union-attr]
    assert [d.request_id for d in out[OTHER].deltas] == ["c"]  # type: ignore[union-attr]
    assert book.drain_outbox() == []


def test_what_a_step_made_of_a_sample_is_one_delta(book: RequestBook) -> None:
    entry = Opened(book).open()
    entries = tuple(TokenLogprobs((each,), (-1.0,)) for each in (5, 6, 7))
    book.on_events([TokensEvent(entry.request, 0, 4, (5, 6, 7), "stop", 7, entries)])
    [(_, tokens)] = book.drain_outbox()
    assert isinstance(tokens, Tokens)
    assert tokens.deltas == (TokenDelta("r", 0, 0, 4, (5, 6, 7), "stop", 7, entries),)
    assert book.num_ended == 1


def test_tokens_come_before_the_failure_that_follows_them(book: RequestBook) -> None:
    entry = Opened(book).open()
    book.on_events([token(entry, 0), FailedEvent(entry.request, "too_long", "why", retryable=False)])
    (_, tokens), (_, failed) = book.drain_outbox()
    assert isinstance(tokens, Tokens)
    assert failed == RequestFailed(request_id="r", attempt=0, code="too_long", message="why", retryable=False)


def test_prompt_logprobs_come_before_the_first_token(book: RequestBook) -> None:
    entry = Opened(book).open()
    book.on_events([PromptLogprobsEvent(entry.request, ()), token(entry, 0)])
    assert [type(message) for _, message in book.drain_outbox()] == [PromptLogprobs, Tokens]


def test_deadlines_end_in_their_order_and_spare_what_has_ended(book: RequestBook) -> None:
    opened = Opened(book)
    late, early, gone = (opened.open(name, deadline_s=s) for name, s in (("late", 9.0), ("early", 5.0), ("gone", 1.0)))
    book.on_events([token(gone, 0, finish="stop")])
    book.drain_outbox()
    assert book.expired(4.9) == []
    assert book.expired(5.0) == [early]
    ((router, failed),) = book.drain_outbox()
    assert router == ROUTER
    assert isinstance(failed, RequestFailed)
    assert (failed.request_id, failed.code, failed.retryable) == ("early", "deadline_exceeded", False)
    assert book.expired(5.1) == []
    assert book.expired(100.0) == [late]


def test_a_lost_router_ends_its_requests_without_a_word(book: RequestBook) -> None:
    opened = Opened(book)
    mine, theirs = opened.open("a"), opened.open("b", OTHER)
    book.on_events([token(mine, 0), token(theirs, 0)])
    assert book.router_lost(ROUTER) == [mine]
    assert book.router_lost(ROUTER) == []
    assert [router for router, _ in book.drain_outbox()] == [OTHER]
    assert list(book.entries) == [("b", 0)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt_token_ids": b""}, "at least one"),
        ({"prompt_token_ids": b"abc"}, "at least one"),
        ({"prompt": (1, 100)}, "outside"),
        ({"prompt": (-1,)}, "outside"),
        ({"prompt": (1,) * 32}, "32"),
        ({"sample_indices": ()}, "sample_indices"),
        ({"sample_indices": (1, 1)}, "sample_indices"),
        ({"num_prior_output_tokens": 3}, "num_prior"),
        ({"num_prior_output_tokens": -1}, "num_prior"),
        ({"num_prior_output_tokens": 2, "sampling": SamplingParams(max_tokens=2)}, "max_tokens"),
        ({"sample_indices": (-1,)}, "sample_indices"),
        ({"sample_indices": (1 << 40,)}, "sample_indices"),
        ({"num_public_tokens": 4}, "num_public"),
        ({"attempt": 1 << 40}, "attempt"),
        ({"attempt": -1}, "attempt"),
        ({"priority": 1 << 40}, "priority"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"deadline_s": math.inf}, "deadline_s"),
        ({"cache_share": math.nan}, "cache_share"),
        ({"salt": bytes(65)}, "salt"),
        ({"context": bytes(65)}, "context"),
        ({"mode": "decode"}, "peer"),
        ({"mode": "prefill"}, "peer"),
        ({"mode": "decode", "peer": PeerRef("", 1, "")}, "peer"),
        ({"mode": "decode", "peer": PeerRef("p", -1, "")}, "peer"),
        ({"is_running": True}, "is_running"),
        ({"prefix": PrefixHint(PeerRef("p", 1, ""), -1)}, "prefix"),
        *(
            ({"sampling": SamplingParams(**{name: value})}, words)
            for name, value, words in (
                ("max_tokens", 0, "max_tokens"),
                ("max_tokens", 1 << 40, "max_tokens"),
                ("min_tokens", -1, "min_tokens"),
                ("temperature", math.nan, "temperature"),
                ("temperature", -1.0, "temperature"),
                ("top_k", 1 << 40, "top_k"),
                ("top_p", 0.0, "top_p"),
                ("min_p", math.nan, "min_p"),
                ("repetition_penalty", 0.0, "repetition_penalty"),
                ("presence_penalty", math.inf, "presence_penalty"),
                ("seed", -1, "seed"),
                ("num_logprobs", -1, "num_logprobs"),
                ("num_prompt_logprobs", 1 << 40, "num_prompt_logprobs"),
                ("logit_bias", ((100, 1.0),), "logit_bias"),
                ("logit_bias", ((1 << 40, 1.0),), "logit_bias"),
                ("logit_bias", ((1, math.nan),), "logit_bias"),
                ("logit_bias", ((1, 1.0),) * 101, "logit_bias"),
                ("stop_token_ids", (-1,), "stop token"),
                ("stop_token_ids", (1 << 40,), "stop token"),
            )
        ),
    ],
)
def test_a_bad_submit_is_refused_for_good(book: RequestBook, fields: dict, words: str) -> None:
    assert book.open(ROUTER, submit(**fields), 0.0) is None
    ((_, failed),) = book.drain_outbox()
    assert isinstance(failed, RequestFailed)
    assert (failed.code, failed.retryable) == ("invalid_request", False)
    assert words in failed.message
    assert book.num_accepted == 0
