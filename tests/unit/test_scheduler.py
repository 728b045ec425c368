"""The scheduler under the pipelined loop, on a device that runs each step late and checks every KV slot it reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fake_runner import FakeRunner, next_token
from tandem.engine.block_pool import BlockPool
from tandem.engine.config import SchedulerOptions
from tandem.engine.core import EngineCore
from tandem.engine.hashing import root_hash
from tandem.engine.request import EngineEvent, FailedEvent, PromptLogprobsEvent, Request, TokenEvent
from tandem.engine.sampling_params import SamplingParams
from tandem.engine.scheduler import Scheduler

BLOCK = 4
EOS = 7


class Harness:
    """Scheduler, late device and what the client would have received."""

    def __init__(self, num_blocks: int = 32, pipelined: bool = True, caching: bool = True, **options: int) -> None:
        settings = SchedulerOptions(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **options})
        self.pool = BlockPool(num_blocks, caching)
        self.scheduler = Scheduler(
            settings,
            self.pool,
            block_size=BLOCK,
            max_model_len=64,
            eos_token_ids=[EOS],
            root_for_salt=lambda salt: root_hash(b"model", salt),
        )
        self.runner = FakeRunner(num_blocks, BLOCK, settings.max_num_seqs)
        self.core = EngineCore(self.scheduler, self.runner, pipelined)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.failed: list[FailedEvent] = []
        self.prompt_logprobs: dict[str, int] = {}
        self._arrivals = 0

    def add(self, name: str, prompt: list[int], samples: tuple[int, ...] = (0,), **sampling: object) -> Request:
        self._arrivals += 1
        priority = int(sampling.pop("priority", 0))  # type: ignore[call-overload]
        request = Request(
            name,
            0,
            np.array(prompt, np.int32),
            SamplingParams(**{"ignore_eos": True, **sampling}),
            samples,
            priority=priority,
            arrival=self._arrivals,
        )
        self.scheduler.add(request)
        return request

    def step(self) -> list[EngineEvent]:
        events = self.core.step()
        for event in events:
            if isinstance(event, TokenEvent):
                key = (event.request.request_id, event.sample_index)
                assert key not in self.finished, "a token came after the end"
                tokens = self.tokens.setdefault(key, [])
                assert event.output_index == len(tokens), "a token is missing or doubled"
                tokens.append(event.token_id)
                if event.finish_reason:
                    self.finished[key] = event.finish_reason
            elif isinstance(event, FailedEvent):
                self.failed.append(event)
            else:
                assert isinstance(event, PromptLogprobsEvent)
                self.prompt_logprobs[event.request.request_id] = len(event.entries)
        self.scheduler.check_integrity()
        return events

    def run(self, limit: int = 2000) -> None:
        for _ in range(limit):
            if not self.core.has_work():
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")


def expected(prompt: list[int], sample: int, num_tokens: int, stop: tuple[int, ...] = ()) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens.append(next_token((*prompt, *tokens), sample))
        if tokens[-1] in stop:
            break
    return tokens


@pytest.mark.parametrize("pipelined", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 40])
def test_a_request_runs_to_its_length(length: int, pipelined: bool) -> None:
    harness = Harness(pipelined=pipelined)
    prompt = list(range(length))
    harness.add("a", prompt, max_tokens=9)
    harness.run()
    assert harness.tokens["a", 0] == expected(prompt, 0, 9)
    assert harness.finished == {("a", 0): "length"}
    harness.scheduler.assert_empty()


def test_chunks_end_on_block_boundaries() -> None:
    harness = Harness(max_prefill_chunk=7)
    harness.add("a", list(range(20)), max_tokens=1)
    output = harness.scheduler.schedule()
    assert output is not None
    assert output.rows[0].num_tokens == 4
    harness.core = EngineCore(harness.scheduler, harness.runner)


def test_running_decodes_come_before_prompt_chunks() -> None:
    harness = Harness(max_num_batched_tokens=6)
    harness.add("a", [1, 2], max_tokens=20)
    for _ in range(3):
        harness.step()
    harness.add("b", list(range(30)), max_tokens=1)
    output = harness.scheduler.schedule()
    assert output is not None
    assert [row.num_tokens for row in output.rows] == [1, 4]


def test_eos_ends_with_at_most_one_overshoot() -> None:
    prompt = [3, 1, 4]
    tokens = expected(prompt, 0, 12)
    stop = tokens[5]
    harness = Harness()
    harness.add("a", prompt, max_tokens=12, stop_token_ids=(stop,))
    harness.run()
    assert harness.tokens["a", 0] == tokens[: tokens.index(stop) + 1]
    assert harness.finished["a", 0] == "stop"
    assert harness.runner.num_rows <= tokens.index(stop) + 2
    harness.scheduler.assert_empty()


def test_min_tokens_holds_the_stop_back() -> None:
    prompt = [3, 1, 4]
    tokens = expected(prompt, 0, 12)
    harness = Harness()
    harness.add("a", prompt, max_tokens=12, min_tokens=6, stop_token_ids=(tokens[2], tokens[8]))
    harness.run()
    assert len(harness.tokens["a", 0]) > 6


def test_samples_fork_from_one_prompt() -> None:
    harness = Harness()
    prompt = list(range(10))
    harness.add("a", prompt, samples=(0, 1, 2), max_tokens=7)
    harness.run()
    for sample in range(3):
        assert harness.tokens["a", sample] == expected(prompt, sample, 7)
    harness.scheduler.assert_empty()
    assert harness.runner.num_rows == 1 + 3 * 6, "the prompt is computed once"


def test_samples_without_slots_or_blocks_still_come() -> None:
    harness = Harness(num_blocks=9, max_num_seqs=2)
    prompt = list(range(10))
    harness.add("a", prompt, samples=(0, 1, 2, 3), max_tokens=7)
    harness.run()
    for sample in range(4):
        assert harness.tokens["a", sample] == expected(prompt, sample, 7)
    harness.scheduler.assert_empty()


def test_a_prefix_is_computed_once() -> None:
    harness = Harness()
    harness.add("a", list(range(12)), max_tokens=2)
    harness.run()
    request = harness.add("b", [*range(12), 30, 31], max_tokens=2)
    harness.run()
    assert request.num_cached_tokens == 12
    again = harness.add("c", list(range(12)), max_tokens=2)
    harness.run()
    assert again.num_cached_tokens == 8, "a hit ends below the prompt's last token"
    harness.scheduler.assert_empty()


def test_preemption_loses_no_token() -> None:
    harness = Harness(num_blocks=10)
    prompts = {name: [ord(name), 1, 2, 3, 4] for name in "abcd"}
    for name, prompt in prompts.items():
        harness.add(name, prompt, max_tokens=20)
    harness.run()
    assert harness.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert harness.tokens[name, 0] == expected(prompt, 0, 20)
    harness.scheduler.assert_empty()


def test_the_least_important_is_preempted() -> None:
    harness = Harness(num_blocks=8)
    low = harness.add("low", [1] * 8, max_tokens=20, priority=5)
    for _ in range(4):
        harness.step()
    high = harness.add("high", [2] * 8, max_tokens=20, priority=0)
    harness.run()
    assert low.num_preemptions > 0
    assert high.num_preemptions == 0
    harness.scheduler.assert_empty()


def test_what_can_never_fit_fails_by_name() -> None:
    harness = Harness(num_blocks=4)
    harness.add("prompt", list(range(20)), max_tokens=1)
    harness.add("growth", list(range(8)), max_tokens=40)
    harness.run()
    assert [(e.request.request_id, e.code) for e in harness.failed] == [
        ("prompt", "too_large_for_pool"),
        ("growth", "too_large_for_pool"),
    ]
    harness.scheduler.assert_empty()


def test_model_length_ends_a_request() -> None:
    harness = Harness()
    harness.add("a", list(range(60)), max_tokens=100)
    harness.run()
    assert len(harness.tokens["a", 0]) == 4
    assert harness.finished["a", 0] == "length"


def test_abort_in_every_moment_frees_everything() -> None:
    for moment in range(14):
        harness = Harness(num_blocks=12, max_num_batched_tokens=5)
        harness.add("a", list(range(11)), samples=(0, 1), max_tokens=6)
        harness.add("b", list(range(9)), max_tokens=6)
        for _ in range(moment):
            harness.step()
        harness.scheduler.abort("a", 0)
        harness.scheduler.abort("a", 0)
        harness.run()
        assert harness.tokens["b", 0] == expected(list(range(9)), 0, 6)
        harness.scheduler.assert_empty()


def test_prompt_logprobs_come_whole_and_skip_the_cache() -> None:
    harness = Harness()
    harness.add("a", list(range(14)), max_tokens=2)
    harness.run()
    request = harness.add("b", list(range(14)), max_tokens=2, num_prompt_logprobs=0)
    harness.run()
    assert request.num_cached_tokens == 0
    assert harness.prompt_logprobs == {"b": 13}


def test_committed_kv_is_decoded_and_forked() -> None:
    """What a decode node does: blocks come filled from elsewhere, the first tokens are known."""
    harness = Harness()
    prompt = list(range(10))
    blocks = harness.pool.allocate_grantable(3)
    assert blocks is not None
    for position in range(10):
        harness.runner.memory[blocks[position // BLOCK], position % BLOCK] = tuple(prompt[: position + 1])
    request = Request("a", 0, np.array(prompt, np.int32), SamplingParams(max_tokens=6, ignore_eos=True), (0, 1, 2))
    first = [(sample, next_token(tuple(prompt), sample), sample == 1) for sample in range(3)]
    for sample, token, _ in first:
        harness.tokens["a", sample] = [token]
    harness.scheduler.add_committed(request, blocks, first)
    harness.run()
    assert harness.tokens["a", 0] == expected(prompt, 0, 6)
    assert harness.tokens["a", 2] == expected(prompt, 2, 6)
    assert len(harness.tokens["a", 1]) == 1
    harness.scheduler.assert_empty()
    assert harness.pool.match_prefix(request.block_hashes), "committed KV serves as prefix"


def test_a_cooling_block_granted_to_a_peer_is_found() -> None:
    """The late device sees what the cooling rule prevents: a peer's write into a block that a step still reads."""
    harness = Harness(num_blocks=4)
    request = harness.add("a", list(range(7)), max_tokens=6)
    harness.step()
    block = request.block_ids[0]
    harness.scheduler.abort("a", 0)
    assert harness.pool.allocate_grantable(4) is None
    assert harness.pool.num_grantable < harness.pool.num_free
    harness.runner.memory[block, 0] = ("peer",)  # type: ignore[assignment]
    harness.core.step()
    assert harness.runner.memory[block, 0] != ("peer",), "the launched step overwrote what the peer had written"


requests = st.lists(
    st.tuples(
        st.integers(1, 30),  # prompt length
        st.integers(0, 2),  # which common prefix
        st.integers(1, 12),  # max_tokens
        st.integers(1, 3),  # samples
        st.integers(0, 2),  # priority
        st.integers(0, 12),  # submitted before step
        st.one_of(st.none(), st.integers(0, 30)),  # aborted before step
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests, st.integers(9, 24), st.integers(1, 5), st.sampled_from([2, 5, 16]), st.booleans())
def test_random_work(plan: list, num_blocks: int, max_seqs: int, budget: int, caching: bool) -> None:
    harness = Harness(num_blocks=num_blocks, caching=caching, max_num_seqs=max_seqs, max_num_batched_tokens=budget)
    prompts = {}
    for turn in range(31):
        for index, (length, prefix, max_tokens, samples, priority, start, abort) in enumerate(plan):
            if start == turn:
                prompts[index] = [prefix] * (length - 1) + [index % 2]
                harness.add(str(index), prompts[index], tuple(range(samples)), max_tokens=max_tokens, priority=priority)
            if abort == turn and start <= turn:
                harness.scheduler.abort(str(index), 0)
        if harness.core.has_work():
            harness.step()
    harness.run()
    failed = {event.request.request_id for event in harness.failed}
    for index, (_, _, max_tokens, samples, _, _, abort) in enumerate(plan):
        if abort is None and str(index) not in failed:
            for sample in range(samples):
                assert harness.tokens[str(index), sample] == expected(prompts[index], sample, max_tokens)
    harness.scheduler.assert_empty()
