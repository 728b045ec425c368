"""Mode "prefill": the scheduler and its half of a connector."""

from __future__ import annotations

import pytest
from engine_harness import BLOCK, EOS, Harness, expected

from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import FirstToken
from tandem.engine.scheduling.request import RequestState


def first_of(prompt: list[int], sample: int) -> int:
    return expected(prompt, sample, SamplingParams(max_tokens=1))[0][0]


@pytest.mark.parametrize("length", [1, 4, 9, 21])
@pytest.mark.parametrize("samples", [(0,), (0, 1, 2)])
def test_a_prompt_leaves_with_its_first_tokens(length: int, samples: tuple[int, ...]) -> None:
    harness = Harness(max_num_batched_tokens=8)
    prompt = list(range(length))
    request = harness.add("a", prompt, samples, mode="prefill", max_tokens=9)
    harness.run()
    assert request.first_tokens == [FirstToken(sample, first_of(prompt, sample), False) for sample in samples]
    assert harness.finished == {}
    assert harness.runner.num_computed_tokens == length, "no row follows the prompt"
    blocks, last_step = harness.connector.held["a"]
    assert blocks == harness.connector.allocated["a"]
    assert len(blocks) == -(-length // BLOCK), "and no block beyond it is taken"
    assert last_step == harness.connector.metas[-1]
    assert request.state is RequestState.FINISHED
    harness.connector.release("a")
    harness.assert_empty()


def test_a_first_token_may_be_the_last() -> None:
    prompt = next(p for p in ([seed, 2] for seed in range(1000)) if first_of(p, 1) == EOS != first_of(p, 0))
    harness = Harness()
    request = harness.add("a", prompt, (0, 1), mode="prefill", max_tokens=9, ignore_eos=False)
    harness.add("b", prompt, mode="prefill", max_tokens=1)
    harness.run()
    assert [token.finished for token in request.first_tokens] == [False, True]
    assert harness.finished == {("a", 1): "stop", ("b", 0): "length"}
    for name in "ab":
        harness.connector.release(name)
    harness.assert_empty()


def test_blocks_that_the_connector_declines_are_freed() -> None:
    harness = Harness(keeps_finished=False)
    harness.add("a", range(9), mode="prefill", max_tokens=9)
    harness.run()
    assert harness.connector.finished == ["a"]
    harness.assert_empty()


def test_a_parked_prompt_lets_others_pass() -> None:
    harness = Harness(max_num_seqs=2)
    harness.connector.parked = {"a"}
    harness.add("a", range(9), mode="prefill", max_tokens=9)
    harness.add("b", range(5), mode="prefill", max_tokens=9)
    harness.add("c", range(5), max_tokens=2)
    for _ in range(6):
        harness.step()
    assert harness.connector.finished == ["b"]
    harness.assert_output("c")
    assert harness.connector.asked.count("a") == 5, "asked at each step that has a free slot"
    assert not harness.core.inflight
    harness.connector.parked.clear()
    harness.run()
    assert harness.connector.finished == ["b", "a"]


def test_a_prompt_without_room_is_not_offered_to_the_connector() -> None:
    harness = Harness(num_blocks=4)
    harness.add("a", range(12), mode="prefill", max_tokens=9)
    harness.add("b", range(12, 0, -1), mode="prefill", max_tokens=9)
    for _ in range(4):
        harness.step()
    assert harness.connector.asked == ["a"]
    harness.connector.release("a")
    harness.run()
    assert harness.connector.finished == ["a", "b"]


def test_the_connector_hears_nothing_of_other_modes() -> None:
    harness = Harness()
    harness.add("a", range(9), max_tokens=3)
    harness.run()
    assert (harness.connector.asked, harness.connector.finished, harness.connector.allocated) == ([], [], {})


@pytest.mark.parametrize("moment", range(5))
@pytest.mark.parametrize("keeps", [True, False])
def test_abort_hands_the_blocks_over_once(moment: int, keeps: bool) -> None:
    harness = Harness(max_num_batched_tokens=4, keeps_finished=keeps)
    request = harness.add("a", range(9), (0, 1), mode="prefill", max_tokens=9)
    for _ in range(moment):
        harness.step()
    harness.scheduler.state.abort(AttemptKey("a", 0))
    harness.scheduler.state.abort(AttemptKey("a", 0))
    harness.check()
    harness.run()
    assert harness.connector.finished == ["a"]
    assert bool(request.first_tokens) == (moment == 4)
    if keeps:
        harness.connector.release("a")
    harness.assert_empty()


def test_abort_of_one_sample_leaves_the_others() -> None:
    harness = Harness()
    request = harness.add("a", range(9), (0, 1, 2), mode="prefill", max_tokens=9)
    harness.step()
    harness.scheduler.state.abort(AttemptKey("a", 0), (1,))
    harness.run()
    assert [token.sample_index for token in request.first_tokens] == [0, 2]
    assert ("a", 1) not in harness.tokens


def test_a_prompt_that_never_fits_is_reported_to_the_connector() -> None:
    harness = Harness(num_blocks=2)
    harness.add("a", range(9), mode="prefill", max_tokens=9)
    harness.run()
    assert harness.failed == {"a": "too_large_for_pool"}
    assert harness.connector.held == {"a": ([], -1)}


def test_a_prompt_to_be_handed_off_is_never_preempted() -> None:
    """A transfer may be reading its blocks. It holds all that it needs from its start on."""
    harness = Harness(num_blocks=10, max_num_batched_tokens=5)
    harness.add("decode", range(5), max_tokens=30, priority=0)
    harness.step()
    prompt = harness.add("prompt", range(23, 0, -1), mode="prefill", max_tokens=9, priority=9)
    for _ in range(40):
        harness.step()
    assert prompt.num_preemptions == 0
    assert len(harness.connector.allocated["prompt"]) == 6
    assert prompt.first_tokens
    harness.connector.release("prompt")
    harness.run()
    harness.assert_output("decode")
    harness.assert_empty()


def test_tokens_from_outside_are_not_computed() -> None:
    harness = Harness()
    prompt = list(range(14))
    harness.connector.num_external_tokens = {"a": 2 * BLOCK}
    load = harness.connector.update_state_after_alloc

    def load_then(request, block_ids, num_external_tokens):  # type: ignore[no-untyped-def]
        assert num_external_tokens == 2 * BLOCK
        harness.runner.peer_writes(block_ids, prompt[: 2 * BLOCK])
        load(request, block_ids, num_external_tokens)

    harness.connector.update_state_after_alloc = load_then  # type: ignore[method-assign]
    request = harness.add("a", prompt, mode="prefill", max_tokens=9)
    harness.run()
    assert harness.runner.num_computed_tokens == 14 - 2 * BLOCK
    assert request.first_tokens == [FirstToken(0, first_of(prompt, 0), False)]


def test_every_step_carries_the_connectors_metadata() -> None:
    harness = Harness()
    harness.add("a", range(9), max_tokens=3)
    outputs = []
    execute = harness.runner.execute

    def spy(output, *hooks):  # type: ignore[no-untyped-def]
        outputs.append(output)
        return execute(output, *hooks)

    harness.runner.execute = spy  # type: ignore[method-assign]
    harness.run()
    assert [output.connector_meta.step_id for output in outputs] == [output.step_id for output in outputs] == [0, 1, 2]


def test_a_prompt_that_its_sink_granted_passes_one_that_lacks_room() -> None:
    """The one that lacks room waits for the parked ones to leave; those may wait for what the granted one keeps at its
    sink."""
    harness = Harness(num_blocks=6)
    harness.add("parked", range(12), mode="prefill", max_tokens=9)
    harness.run()
    harness.add("large", range(20, 36), mode="prefill", max_tokens=9)
    harness.add("small", range(40, 48), mode="prefill", max_tokens=9)
    harness.step()
    assert "small" not in harness.connector.asked, "large ones would never start"
    harness.connector.granted = {"small"}
    for _ in range(4):
        harness.step()
    assert harness.connector.finished == ["parked", "small"]
    harness.connector.release("small")
    harness.connector.release("parked")
    harness.run()
    assert harness.connector.finished[-1] == "large"
    harness.connector.release("large")
    harness.assert_empty()


def test_a_prompt_that_its_sink_granted_gets_what_tickets_pin() -> None:
    """Tickets may wait for what the granted one keeps at its sink; one that has no grant waits like them."""
    harness = Harness(num_blocks=6)
    pool = harness.pool
    pinned = pool.allocate(4)
    assert pinned is not None

    harness.connector.held["ticket"] = pinned, -1

    def give_back() -> None:
        pool.reservations.end(hold)
        harness.connector.release("ticket")

    hold = pool.reservations.add(Kind.HITS, len(pinned), give_back, "a ticket")
    harness.add("a", range(3 * BLOCK), mode="prefill", max_tokens=9)
    harness.step()
    assert harness.connector.asked == []
    harness.connector.granted = {"a"}
    harness.run()
    assert harness.connector.finished == ["a"]
    harness.connector.release("a")
    harness.assert_empty()
