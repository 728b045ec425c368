"""A request of higher priority takes the slot of a running one, on one node and on the decode node of two, which keep
deadlines."""

from __future__ import annotations

import pytest
from split_pair import GREEDY, Alone, changed, make_pair

from tandem.engine.contracts.wire.parts import Targets
from tiny_models import random_prompt


@pytest.mark.parametrize("is_split", [False, True], ids=["single", "split"])
def test_who_matters_more_ends_first(is_split: bool, alone: Alone) -> None:
    long, short = changed(GREEDY, max_tokens=400), changed(GREEDY, max_tokens=4)
    low_prompt, high_prompt = random_prompt(40, seed=51), random_prompt(70, seed=52)
    with make_pair("local", decode={"max_num_seqs": 1, "tpot_target_ms": 5}) as pair:
        prefill = pair.prefill.info if is_split else None
        client, decode = pair.client, pair.decode.info
        pair.decode.hold_after(6)
        low = client.submit("low", low_prompt, long, decode=decode, prefill=prefill, priority=5)
        pair.until(lambda: len(low.tokens.get(0, ())) > 2)
        hasty = Targets(0.2, 0.01, 0.02)
        high = client.submit("high", high_prompt, short, decode=decode, prefill=prefill, priority=0, targets=hasty)
        state = pair.decode.process.logic.scheduler.state
        pair.until(lambda: len(state.queues.waiting) == 1)
        pair.decode.go_on()
        client.wait()
        assert state.num_preemptions == 1
        assert (low.failed, high.failed) == (None, None)
        assert [low.output()] == alone.run(low_prompt, long)
        assert [high.output()] == alone.run(high_prompt, short)
        pair.check_whole()
