"""Prompts whose beginnings other real nodes compute at the same time: the answers of a node alone, whatever happens."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from node_child import NodeChild
from pull_nodes import Nodes, greet, make_nodes
from waiting import wait_until

from in_process_cluster import BLOCK
from tandem.engine.contracts.errors import TransportError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.requests import FlushBlocks
from tandem.kv_connector.protocol.jobs import BlockPush
from tiny_models import random_prompt

PROMPT = random_prompt(9 * BLOCK + 3, seed=5)
HALF = 5 * BLOCK  # of it, which a helper computes
LOGPROBS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, num_logprobs=5)


def before_last_layer(nodes: Nodes, helper: int, act: Callable[[], None], computing: int) -> None:
    """The helper pushes the last layer of what it computes when node `computing` has begun behind the layers before,
    and `act` was called. So that has begun early, or there is no end."""
    pusher = nodes.nodes[helper].process.transfer._pusher
    push, num_layers = pusher.push, len(nodes.nodes[helper].process.loaded.model.attention_layers)

    def held(job: BlockPush, layers: range | None, written: tuple = ()) -> None:
        if job.is_awaited and layers is not None and layers.stop == num_layers:
            wait_until(lambda: nodes.count(computing, "pull_early") > 0, "the prompt's end to begin")
            act()
        push(job, layers, written)

    pusher.push = held


def nothing() -> None: ...


def check_that_it_costs_the_attempt(nodes: Nodes) -> None:
    """What befalls node 0 while it helps node 1, which tells nothing of it, and serves on."""
    result = nodes.submit(PROMPT, on=1, helpers=[0])
    nodes.client.wait(result)
    assert result.failed is not None
    assert (result.failed.code, result.failed.retryable, result.tokens) == ("handoff_failed", True, {})
    nodes.ask(PROMPT, on=1)


@pytest.mark.parametrize("way", ["shm", "tcp"])
def test_two_nodes_compute_a_prompt_and_a_third_decodes(way: str) -> None:
    """With the log-probabilities, to the last bit, of one node whose chunks are the same."""
    with make_nodes("decode", "prefill", "prefill", transport=way, chunk=HALF) as nodes:
        nodes.sampling = LOGPROBS
        alone = nodes.ask(PROMPT, on=0)
        nodes.client.send(nodes.nodes[0].info, FlushBlocks())
        before_last_layer(nodes, 1, nothing, computing=2)
        together = nodes.ask(PROMPT, on=0, prefill=2, helpers=[1])
        assert nodes.count(2, "pull_tokens") == HALF
        assert together.logprobs == alone.logprobs


def test_each_node_helps_the_next() -> None:
    with make_nodes("unified", "unified", "unified", transport="shm") as nodes:
        for helper in (0, 1):
            before_last_layer(nodes, helper, nothing, computing=helper + 1)
        nodes.ask(PROMPT, on=2, helpers=[0, 1])
        assert [nodes.count(index, "pull_tokens") for index in range(3)] == [0, 3 * BLOCK, 6 * BLOCK]
        nodes.ask(PROMPT + random_prompt(2 * BLOCK, seed=6), on=2)
        assert nodes.nodes[2].process.logic.scheduler.state.num_cached_tokens >= 9 * BLOCK, "what came was kept"


def test_what_comes_wrong_costs_the_attempt_and_is_never_told() -> None:
    with make_nodes("unified", "unified", transport="shm", changes={0: {"fault_injection": "corrupt:*"}}) as nodes:
        before_last_layer(nodes, 0, nothing, computing=1)
        check_that_it_costs_the_attempt(nodes)


def test_a_helper_that_fails_in_the_middle_costs_the_attempt() -> None:
    def fail() -> None:
        raise TransportError("cut")

    with make_nodes("unified", "unified", transport="shm") as nodes:
        before_last_layer(nodes, 0, fail, computing=1)
        check_that_it_costs_the_attempt(nodes)


def test_a_cancelled_prompt_leaves_nothing_at_its_helper() -> None:
    with make_nodes("unified", "unified", transport="shm", changes={0: {"fault_injection": "delay:0.2"}}) as nodes:
        cancelled = nodes.submit(PROMPT, on=1, helpers=[0])
        nodes.until(lambda: nodes.count(1, "pull_asked") == 1)
        nodes.cancel(cancelled, on=1)
        nodes.client.wait(cancelled)


def test_a_node_that_has_other_work_declines() -> None:
    with make_nodes("unified", "unified", transport="shm") as nodes:
        busy = nodes.submit(random_prompt(BLOCK, seed=7), on=0)
        nodes.nodes[0].hold_after(1)
        nodes.until(lambda: bool(nodes.nodes[0].process.logic.scheduler.state.queues.running))
        nodes.ask(PROMPT, on=1, helpers=[0])
        assert (nodes.count(1, "pull_asked"), nodes.count(1, "pull_completed")) == (1, 0)
        nodes.nodes[0].go_on()
        nodes.client.wait(busy)


@pytest.mark.parametrize("num_rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_two_full_nodes_that_help_each_other_at_once(num_rounds: int) -> None:
    """In opposite order, with room for one and a half prompts on each: whoever lacks room computes alone."""
    with make_nodes("unified", "unified", transport="shm", num_blocks=17) as nodes:
        for turn in range(num_rounds):
            prompts = [random_prompt(9 * BLOCK + 3, seed=100 + 2 * turn + index) for index in range(2)]
            results = [nodes.submit(prompt, on=index, helpers=[1 - index]) for index, prompt in enumerate(prompts)]
            nodes.client.wait(*results)
            for prompt, result in zip(prompts, results, strict=True):
                nodes.check(result, prompt)


def test_a_helper_dies() -> None:
    """Before the prompt's end has begun it is computed alone; after, the attempt fails and another may follow."""
    child = NodeChild(("prefill",), "shm", "die:2")
    try:
        info = greet(child.addresses[0])
        with make_nodes("unified", transport="shm") as nodes:
            result = nodes.submit(PROMPT, on=0, helper_infos=[info])
            nodes.client.wait(result)
            assert child.process.wait(60) == -signal.SIGKILL, "the fault did not strike: this test shows nothing"
            if result.failed is None:
                nodes.check(result, PROMPT)
            else:
                assert (result.failed.code, result.failed.retryable, result.tokens) == ("handoff_failed", True, {})
            nodes.ask(PROMPT, on=0)
    finally:
        child.stop()
