"""Random traffic on tiny pools: every invariant after every step, every output equal to its definition at the end.

Submissions of all kinds (full, to be handed off, committed by a peer), samples, priorities, stops, prior output, prompt
logprobs, cache options, lower tiers; whole and partial aborts, parked prompts, grants, flushes, in any order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from engine_harness import ADAPTERS, BLOCK, EOS, SALTS, Harness, TierSizes, expected
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fake_runner import FakeDraft
from tandem.engine.scheduling.prompt_order import ArrivalOrder
from tandem.engine.scheduling.request import Request

# Few tokens, so that prefixes of different requests are equal often.
prompts = st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(0, 1)).map(
    lambda t: [t[0]] * (t[1] - 1) + [t[2]]
)
sampling = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 14),
        "min_tokens": st.sampled_from([0, 0, 0, 3]),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (), (3, 5)]),
        "priority": st.integers(0, 2),
        "use_prefix_cache": st.sampled_from([True, True, True, False]),
        "salt": st.sampled_from([*SALTS, b""]),
        "adapter": st.sampled_from([*ADAPTERS, 0, 0]),
        "num_prompt_logprobs": st.sampled_from([None, None, None, 0]),
        "beam_width": st.sampled_from([0, 0, 0, 0, 1, 4]),
    }
)
samples = st.sampled_from([(0,), (0,), (2,), (0, 1), (3, 0, 1)])


class AnyOrder(ArrivalOrder):
    """Another one at each step: whatever a policy does, requests end and blocks are whole."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = random.Random(0)

    def arrange(self, started: Sequence[Request], waiting: Sequence[Request], num_cached: object) -> list[Request]:
        both = [*started, *waiting]
        self._rng.shuffle(both)
        return both


class Traffic(RuleBasedStateMachine):
    harness: Harness

    @initialize(
        num_blocks=st.integers(6, 20),
        max_num_seqs=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 8, 32]),
        max_chunk=st.sampled_from([0, 0, 5]),
        caching=st.booleans(),
        pipelined=st.sampled_from([True, True, True, False]),
        limits=st.booleans(),
        keeps=st.sampled_from([True, True, False]),
        shuffled=st.booleans(),
        contended_chunk=st.sampled_from([0, 3]),
        wrong_every=st.sampled_from([None, None, 0, 2]),
        speculates=st.booleans(),
        window=st.sampled_from([0, 0, 1, 6, 11]),
        num_windows=st.sampled_from([0, 1, 2]),
        tiers=st.none() | st.tuples(st.integers(1, 12), st.sampled_from([0, 0, 5, 9]), *[st.integers(0, 3)] * 2),
    )
    def start(
        self,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        max_chunk: int,
        caching: bool,
        pipelined: bool,
        limits: bool,
        keeps: bool,
        shuffled: bool,
        contended_chunk: int,
        wrong_every: int | None,
        speculates: bool,
        window: int,
        num_windows: int,
        tiers: TierSizes | None,
    ) -> None:
        """`wrong_every`: how good a draft model is; None: there is none."""
        draft = None if wrong_every is None else FakeDraft(num_blocks, BLOCK, max_num_seqs, [EOS], wrong_every)
        self.harness = Harness(
            num_blocks,
            pipelined,
            caching,
            keeps,
            limits,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_prefill_chunk=max_chunk,
            decode_prompt_budget=5,
            contended_prefill_chunk=contended_chunk,
            prompt_order=AnyOrder() if shuffled else None,
            tiers=tiers,
            speculates=speculates and draft is None,
            draft=draft,
            window=window if draft is None or num_windows else 0,  # a draft model sees further back in the same blocks
            num_windows=num_windows if window else 0,
        )
        self.granted: list[list[int]] = []
        self.aborted: set[tuple[str, int]] = set()

    # --- requests -------------------------------------------------------------------------------------------

    def _name(self) -> str:
        return f"r{len(self.harness.requests)}"

    @rule(prompt=prompts, samples=samples, settings=sampling)
    def add(self, prompt: list[int], samples: tuple[int, ...], settings: dict[str, Any]) -> None:
        self.harness.add(self._name(), prompt, samples, **settings)

    @rule(prompt=prompts, prior=st.integers(1, 5), settings=sampling)
    def add_with_prior_output(self, prompt: list[int], prior: int, settings: dict[str, Any]) -> None:
        if len(prompt) > prior < settings["max_tokens"]:
            settings = {**settings, "num_prompt_logprobs": None, "beam_width": 0}
            self.harness.add(self._name(), prompt, num_prior_output_tokens=prior, **settings)

    @rule(prompt=prompts, samples=samples, settings=sampling, parked=st.booleans())
    def add_for_hand_off(
        self, prompt: list[int], samples: tuple[int, ...], settings: dict[str, Any], parked: bool
    ) -> None:
        name = self._name()
        if parked:
            self.harness.connector.parked.add(name)
        self.harness.add(name, prompt, samples, mode="prefill", **settings)

    @rule(prompt=prompts, samples=samples, settings=sampling)
    def commit(self, prompt: list[int], samples: tuple[int, ...], settings: dict[str, Any]) -> None:
        """Hits are pinned, the rest is granted, written by the peer at once, and committed."""
        harness = self.harness
        request = harness.request(self._name(), prompt, samples, mode="decode", **settings)
        harness.scheduler.state.kv.extend_hashes(request)
        hits = harness.pool.windows.usable(harness.pool.match_prefix(request.block_hashes))
        harness.pool.touch(hits)
        granted = harness.pool.allocate_grantable(-(-len(prompt) // BLOCK) - len(hits))
        if granted is None:
            harness.pool.free(hits, None)
            del harness.requests[request.key.request_id]
            return
        for position in range(len(hits) * BLOCK, len(prompt)):
            block_id = granted[position // BLOCK - len(hits)]
            for each in (block_id, *harness.pool.windows.of(block_id)):
                harness.runner.memory[each][position % BLOCK] = tuple(prompt[: position + 1])
        harness.commit(request, hits + granted)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.harness.requests.values())))
        ended = data.draw(st.sampled_from([(), self.harness.samples[request.key.request_id][:1]]))
        self.harness.scheduler.state.abort(request.key, ended)
        self.aborted |= {(request.key.request_id, sample) for sample in ended or range(8)}

    # --- the world around -----------------------------------------------------------------------------------

    @rule()
    def unpark(self) -> None:
        self.harness.connector.parked.clear()

    @precondition(lambda self: self.harness.connector.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.harness.connector.release(data.draw(st.sampled_from(sorted(self.harness.connector.held))))

    @rule(num=st.integers(1, 4))
    def grant(self, num: int) -> None:
        """Blocks that a peer may write from now on: no step may."""
        blocks = self.harness.pool.allocate_grantable(num)
        if blocks is not None:
            self.granted.append(blocks)
            self.harness.external.update(blocks)
            self.harness.runner.peer_blocks |= set(blocks)

    @precondition(lambda self: self.granted)
    @rule()
    def take_grant_back(self) -> None:
        blocks = self.granted.pop(0)
        self.harness.external -= Counter(blocks)
        self.harness.runner.peer_blocks -= set(blocks)
        self.harness.pool.free(blocks, None)

    @rule()
    def flush(self) -> None:
        self.harness.scheduler.state.flush()

    @rule(num=st.integers(1, 6))
    def steps(self, num: int) -> None:
        for _ in range(num):
            self.harness.step()

    @rule()
    def preempt(self) -> None:
        running = [r for r in self.harness.scheduler.state.queues.running if r.prompt.mode != "prefill"]
        if running:
            self.harness.scheduler.state.preempt(running[-1])

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    # --- the end --------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        while self.granted:
            self.take_grant_back()
        self.unpark()
        for _ in range(3000):
            if not self.harness.core.has_work():
                break
            self.harness.step()
            for name in list(self.harness.connector.held):
                self.harness.connector.release(name)
        for name in list(self.harness.connector.held):
            self.harness.connector.release(name)
        self.harness.settle()
        for request in self.harness.requests.values():
            self._check_output(request)
        self.harness.assert_empty()

    def _check_output(self, request: Request) -> None:
        name, harness = request.key.request_id, self.harness
        if name in harness.failed and request.prompt.sampling.beam_width:
            assert harness.failed[name] in ("too_large_for_pool", "invalid_request")
            return
        if name in harness.failed:
            needed = -(-max(len(request.prompt.token_ids) + request.prompt.sampling.max_tokens - 1, 1) // BLOCK)
            assert harness.failed[name] == "too_large_for_pool"
            assert harness.pool.cost(needed) > harness.pool.num_blocks, "it would have fitted"
            return
        for sample in harness.samples[name]:
            if (name, sample) in self.aborted:
                continue
            if request.prompt.mode == "prefill" and request.prompt.sampling.beam_width:
                assert [token.candidates is None for token in request.first_tokens][:1] == [False]
            elif request.prompt.mode == "prefill":
                prompt = request.prompt.token_ids.tolist()
                assert harness.tokens[name, sample] == expected(prompt, sample, request.prompt.sampling)[0][:1]
            else:
                harness.assert_output(name, sample)
        if request.prompt.sampling.num_prompt_logprobs is not None and request.prompt.mode != "decode":
            positions = list(range(1, request.num_prompt_tokens))
            assert harness.prompt_logprobs.get(name, positions) == positions


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
class TestMuchTraffic(Traffic.TestCase):  # type: ignore[misc,name-defined]
    settings = settings(
        max_examples=3000, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
    )
