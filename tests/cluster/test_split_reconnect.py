"""A prefill node falls silent for longer than `peer_lost_s` and goes on; both nodes are the processes they were."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from split_pair import GREEDY, WAYS, Pair, changed, make_pair
from waiting import PATIENCE_S

from in_process_cluster import FAST
from tiny_models import random_prompt

TIMES = replace(FAST, peer_lost_s=1.5, grant_lease_s=5.0)
SHORT = changed(GREEDY, max_tokens=4)


def fall_silent(pair: Pair) -> None:
    """The prefill node's I/O thread stands still, the rest of it goes on, until the decode node has noticed."""
    lost, noticed = pair.decode.process.control.counters.lost_peers, threading.Event()
    pair.prefill.process._board.is_stuck = lambda: not noticed.wait(PATIENCE_S)  # type: ignore[method-assign]
    pair.until(lambda: pair.decode.process.control.counters.lost_peers > lost)
    noticed.set()


@pytest.mark.parametrize("way", WAYS)
def test_hand_offs_go_on_after_a_silence(way: str) -> None:
    prompt = random_prompt(70, seed=3)
    with make_pair(way, decode={"timeouts": TIMES}, prefill={"timeouts": TIMES}) as pair:
        expected = pair.run(prompt, SHORT).output()
        for _ in range(2):
            under_way = [pair.submit(random_prompt(180, seed=seed), SHORT) for seed in range(3)]
            fall_silent(pair)
            commits = pair.sink.commits
            result = pair.run(prompt, SHORT, deadline_s=20.0)
            while result.failed is not None:  # it met the prefill node's discovery that it was dropped
                assert result.failed.retryable, result.failed
                result = pair.run(prompt, SHORT, deadline_s=20.0)  # as a router would
            assert result.failed is None, result.failed
            assert result.output() == expected
            assert pair.sink.commits > commits, "it was handed over, not computed elsewhere"
            pair.client.wait(*under_way)
            pair.check_whole()
        assert pair.decode.process.logic.handoffs.sink.ledger.num_quarantined == 0  # type: ignore[attr-defined]
