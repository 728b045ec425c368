"""When a running sequence is pushed, held, let go and taken up again, on a real scheduler with a late device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from engine_harness import BLOCK, HalfRight, Harness, expected

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import Continuation, PeerRef
from tandem.engine.contracts.wire.requests import Migrate
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.outcomes import HandoffCompleted, HandoffFailed
from tandem.node import departures
from tandem.node.departures import Departures
from tandem.node.requests import AcceptedRequest

KEY = AttemptKey("r", 2)
PROMPT = list(range(2, 12))


class HandSource:
    """Stands for the SourceManager: the test says when it is granted, when pushes arrive, when it ends."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self.granted = self.flushed = False
        self.held: list[int] = []
        self.pushes: list[int] = []  # tokens that were settled at each push
        self.handed: Continuation | None = None
        self.cancelled = False

    def knows(self, key: object) -> bool:
        return False

    def follow(self, key: object, peer: object, most_tokens: int, deadline: float, now: float, first_kept: int) -> None:
        self.most_tokens, self.flushed = most_tokens, True

    def is_pushing(self, key: object) -> bool:
        return self.granted and self.handed is None and not self.cancelled

    def is_flushed(self, key: object) -> bool:
        return self.flushed

    def holds_blocks(self, key: object) -> bool:
        return bool(self.held)

    def push_settled(self, key: object, block_ids: list[int], num_tokens: int, now: float) -> int:
        num_new = num_tokens // BLOCK - len(self.held)
        self._hold(block_ids[: num_tokens // BLOCK])
        self.pushes.append(num_tokens)
        self.flushed = num_new <= 0
        return num_new

    def hand_over(self, key: object, block_ids: list[int], continuation: Continuation, now: float) -> None:
        self._hold(block_ids[: -(-continuation.num_tokens // BLOCK)])
        self.handed = continuation

    def cancel(self, key: AttemptKey, now: float) -> None:
        self.cancelled = True

    def _hold(self, block_ids: list[int]) -> None:
        new = block_ids[len(self.held) :]
        self._harness.pool.touch(new)
        self._harness.external.update(new)
        self.held += new

    def let_go(self) -> None:
        self._harness.pool.free(self.held, None)
        self._harness.external.subtract(self.held)
        self.held = []


class Leaving:
    """A request "r" that decodes, and the Migrations of its node."""

    def __init__(
        self, num_blocks: int = 32, speculates: bool = False, prompt: Sequence[int] = PROMPT, **settings: Any
    ) -> None:
        self.harness = Harness(num_blocks, speculates=speculates)
        self.request = self.harness.add("r", prompt, **{"max_tokens": 40, **settings})
        self.source = HandSource(self.harness)
        self.closed: list[tuple[object, int]] = []
        entry = AcceptedRequest(self.request, "router", None, 0.0, {0})  # type: ignore[arg-type]
        book = SimpleNamespace(
            entries={self.request.key: entry}, sample_left=lambda key, sample: self.closed.append((key, sample))
        )
        self.departures = Departures(self.source, self.harness.scheduler, book)  # type: ignore[arg-type]

    def turn(self, number: int = 1) -> None:
        for _ in range(number):
            self.departures.advance(1.0)
            self.departures.check_integrity()
            self.harness.step()

    def begin(self, num_tokens: int = 0, router: str = "router") -> bool:
        known = num_tokens or self.request.num_tokens
        order = Migrate(
            request_id="r", attempt=0, sample_index=0, peer=PeerRef("e", 9, ""), successor=KEY, num_tokens=known,
            deadline_s=5.0,
        )  # fmt: skip
        return self.departures.begin(router, order, 1.0)

    def counted(self) -> tuple[int, int]:
        """Of those that began: finished, failed."""
        counters = self.departures.counters
        return counters.finished, counters.failed

    def reasons(self) -> list[str]:
        return [message.reason for _, message in self.departures.drain_outbox()]  # type: ignore[attr-defined]

    def hand_over(self) -> Continuation:
        self.turn(4)
        assert self.begin()
        self.source.granted = True
        while self.source.handed is None:
            self.turn()
            self.source.flushed = True
        return self.source.handed


def test_all_that_the_peer_needs_is_handed_over_and_then_it_is_forgotten() -> None:
    leaving = Leaving()
    handed = leaving.hand_over()
    whole, _ = expected(PROMPT, 0, leaving.request.prompt.sampling)
    known = leaving.request.output_token_ids
    assert known == whole[: len(known)]
    assert handed.num_tokens == len(PROMPT) + len(known) - 1
    assert [*handed.token_ids] == known[len(known) - len(handed.token_ids) :]
    leaving.turn(3)
    assert leaving.request.output_token_ids == known, "it stands still"
    leaving.departures.on_outcome(HandoffCompleted(KEY, ""), 2.0)
    assert leaving.reasons() == [""]
    assert leaving.closed == [(leaving.request.key, 0)]
    assert leaving.counted() == (1, 0)
    leaving.source.let_go()
    leaving.harness.scheduler.assert_empty()


def test_what_comes_to_nothing_goes_on_when_nobody_reads_its_blocks() -> None:
    leaving = Leaving()
    leaving.hand_over()
    leaving.departures.on_outcome(HandoffFailed(KEY, "no room", True), 2.0)
    assert leaving.reasons() == ["no room"]
    num_known = leaving.request.num_tokens
    leaving.turn(3)
    assert leaving.request.num_tokens == num_known, "a block with two holders is not written"
    leaving.source.let_go()
    leaving.turn(60)
    assert leaving.harness.tokens["r", 0] == expected(PROMPT, 0, leaving.request.prompt.sampling)[0]
    assert leaving.departures.is_idle
    assert leaving.counted() == (0, 1)
    leaving.harness.scheduler.assert_empty()


def test_a_cancel_that_overtakes_the_commit_is_no_failure() -> None:
    """The successor's first token makes the router cancel what it followed."""
    leaving = Leaving()
    leaving.hand_over()
    leaving.harness.scheduler.state.abort(AttemptKey("r", 0))
    leaving.turn()
    assert leaving.source.cancelled
    assert leaving.reasons() == [outcomes.ENDED]
    leaving.source.let_go()
    leaving.turn()
    assert leaving.departures.is_idle
    assert leaving.counted() == (0, 0)


def test_only_blocks_whose_tokens_the_host_knows_are_pushed() -> None:
    leaving = Leaving()
    leaving.turn(5)
    assert leaving.request.num_in_flight
    known = leaving.request.num_tokens
    leaving.begin()
    leaving.source.granted = True
    leaving.departures.advance(1.0)
    assert leaving.source.pushes == [], "the step that is in flight may compute what is known"
    leaving.turn(2)
    assert leaving.source.pushes
    assert leaving.source.pushes[0] >= known


def test_a_sequence_that_stands_still_is_not_preempted() -> None:
    leaving = Leaving(num_blocks=8)
    leaving.hand_over()
    leaving.harness.add("other", list(range(20, 30)), max_tokens=20, priority=-1)
    leaving.turn(30)
    assert leaving.request.num_preemptions == 0
    leaving.departures.on_outcome(HandoffCompleted(KEY, ""), 2.0)
    leaving.source.let_go()
    leaving.turn(60)
    assert leaving.harness.finished["other", 0] == "length"


@pytest.mark.parametrize("case", ["waiting", "another router's", "more tokens than there are", "twice"])
def test_what_cannot_move_is_answered_at_once(case: str) -> None:
    leaving = Leaving()
    if case != "waiting":
        leaving.turn(5)
    if case == "twice":
        assert leaving.begin()
        leaving.departures._departures = {("r", 1): leaving.departures._departures[KEY]}  # under another number
    router = "other" if case.startswith("another") else "router"
    assert not leaving.begin(99 if case.startswith("more") else 0, router)
    (reason,) = leaving.reasons()
    assert reason in (outcomes.UNKNOWN, outcomes.NOT_DECODING)
    assert not leaving.request.is_paused


def test_one_that_grows_too_fast_for_its_grant_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departures, "LEAST_GROWTH_TOKENS", 4)
    monkeypatch.setattr(departures, "GROWTH_BLOCKS", 1)
    leaving = Leaving()
    leaving.turn(5)
    assert leaving.begin()
    leaving.turn(8)
    assert leaving.reasons() == [outcomes.OUTGROWN]
    assert leaving.source.cancelled
    leaving.turn(60)
    assert leaving.harness.finished["r", 0] == "length"


def test_one_that_ends_meanwhile_cancels_its_hand_off() -> None:
    leaving = Leaving(max_tokens=8)
    leaving.turn(5)
    assert leaving.begin()
    leaving.turn(12)
    assert leaving.harness.finished["r", 0] == "length"
    assert leaving.source.cancelled
    assert leaving.reasons() in ([outcomes.ENDED], [outcomes.OUTGROWN])


@pytest.mark.parametrize("num_known", range(8, 16))
def test_a_sequence_never_outgrows_the_room_that_was_claimed(monkeypatch: pytest.MonkeyPatch, num_known: int) -> None:
    """Though right guesses bring many tokens a step, and the loop launches a second step in a turn behind one."""
    monkeypatch.setattr(departures, "LEAST_GROWTH_TOKENS", 1)
    monkeypatch.setattr(departures, "GROWTH_BLOCKS", 1)
    monkeypatch.setattr(HalfRight, "num_speculative_tokens", 2)
    leaving = Leaving(speculates=True, prompt=[1, 2, 3], ignore_eos=True)
    core = leaving.harness.core
    while len(leaving.request.output_token_ids) < num_known:
        leaving.harness.step()
    assert leaving.begin()
    leaving.source.granted, leaving.source.flushed = True, False
    while leaving.source.handed is None:
        leaving.departures.advance(1.0)
        core.launch()
        core.read()
        if core.device_waits:
            core.launch()
    assert leaving.source.handed.num_tokens <= leaving.source.most_tokens
