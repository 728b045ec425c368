"""Prompts that several real nodes compute, chunk by chunk in turn: the answers of a node alone, whatever happens."""

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

CHUNK = 2 * BLOCK
ROUNDS = 5 * CHUNK - 5  # tokens that two nodes compute in just these chunks, the second of them two
PROMPT = random_prompt(ROUNDS, seed=5)
LOGPROBS = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, num_logprobs=5)


def before_last_layer(nodes: Nodes, helper: int, act: Callable[[BlockPush], None]) -> None:
    """The helper pushes the last layer of each of its chunks when a step of its sink waits for it, and `act` was
    called. So that step has begun early, or there is no end."""
    process = nodes.nodes[helper].process
    push, table, num_layers = process.transfer._pusher.push, process.worker._tables[-1], process.transfer.pool.shape[2]

    def held(job: BlockPush, layers: range | None, written: tuple = ()) -> None:
        if job.is_awaited and layers is not None and (job.table, layers.stop) == (table, num_layers):
            (sink,) = (node for node in nodes.nodes if node.info.node_id == job.grant.sink_id)
            arrivals = sink.process.transfer.arrivals
            over = lambda: job.grant_id not in arrivals._by_grant  # noqa: E731
            wait_until(lambda: awaits(arrivals._awaited, job) or over(), "the chunk behind it to begin")
            act(job)
        push(job, layers, written)

    process.transfer._pusher.push = held  # type: ignore[method-assign]


def awaits(awaited: dict, job: BlockPush) -> bool:
    needed = [each for slots in list(awaited.values()) for _, each in list(slots)]
    return job.grant_id in [each.grant.grant_id for each in needed]


def nothing(job: BlockPush) -> None: ...


def check_that_it_costs_the_attempt(nodes: Nodes) -> None:
    """What befalls node 0 while it helps node 1, which tells nothing of it, and serves on."""
    result = nodes.submit(PROMPT, on=1, helpers=[0])
    nodes.client.wait(result)
    assert result.failed is not None
    assert (result.failed.code, result.failed.retryable, result.tokens) == ("help_lost", True, {})
    nodes.ask(PROMPT, on=1)


@pytest.mark.parametrize("way", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_two_nodes_compute_a_prompt_and_a_third_decodes(way: str) -> None:
    """With the log-probabilities, to the last bit, of one node whose chunks are the same, in two rounds."""
    with make_nodes("decode", "prefill", "prefill", transport=way, chunk=CHUNK) as nodes:
        nodes.sampling = LOGPROBS
        alone = nodes.ask(PROMPT, on=0)
        nodes.client.send(nodes.nodes[0].info, FlushBlocks())
        before_last_layer(nodes, 1, nothing)
        together = nodes.ask(PROMPT, on=0, prefill=2, helpers=[1])
        assert [nodes.count(node, "shared_tokens") for node in (1, 2)] == [2 * CHUNK, 2 * CHUNK]
        assert together.logprobs == alone.logprobs


# Windows of 32 or 21 tokens, which are as long as a chunk, longer, and shorter.
BOTH_KINDS = [
    ("qwen2_hybrid", CHUNK),
    ("qwen2_hybrid", BLOCK),
    ("gpt_oss", CHUNK),
    ("gemma3_deep", BLOCK),
    pytest.param("gpt_oss", BLOCK, marks=pytest.mark.slow),
    pytest.param("gemma3_deep", CHUNK, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "chunk"), BOTH_KINDS)
def test_layers_of_both_kinds_where_a_third_node_decodes(model: str, chunk: int) -> None:
    """Each layer waits for its own, whichever table it has. The third gets no more than the last window."""
    prompt = random_prompt(5 * chunk - 5, seed=5)
    with make_nodes("decode", "prefill", "prefill", transport="shm", model=model, chunk=chunk) as nodes:
        nodes.sampling, process = LOGPROBS, nodes.nodes[2].process
        alone = nodes.ask(prompt, on=0, prefill=2)
        moved = process.transfer.counters["kv_pushed_bytes"]
        for node in nodes.nodes:
            nodes.client.send(node.info, FlushBlocks())
        before_last_layer(nodes, 1, nothing)
        together = nodes.ask(prompt, on=0, prefill=2, helpers=[1])
        assert [nodes.count(node, "shared_tokens") for node in (1, 2)] == [2 * chunk, 2 * chunk]
        assert together.logprobs == alone.logprobs
        to_helper = 2 * chunk * process.loaded.layout.group.blocks_each * process.loaded.layout.payload_bytes // BLOCK
        assert process.transfer.counters["kv_pushed_bytes"] == 2 * moved + to_helper


@pytest.mark.parametrize(("model", "chunk"), BOTH_KINDS)
def test_layers_of_both_kinds_on_three_nodes(model: str, chunk: int) -> None:
    """What slid out is free again as soon as all is verified; what came is found, and may lack what slid out."""
    prompt = random_prompt(7 * chunk - 1, seed=6)
    with make_nodes("unified", "unified", "unified", transport="shm", model=model, chunk=chunk) as nodes:
        nodes.sampling, last = LOGPROBS, nodes.nodes[2].process
        alone = nodes.ask(prompt, on=0)
        nodes.client.send(nodes.nodes[0].info, FlushBlocks())
        together = nodes.ask(prompt, on=2, helpers=[0, 1])
        assert nodes.count(2, "shared_tokens") == 4 * chunk
        assert together.logprobs == alone.logprobs
        nodes.sampling = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        stream = nodes.submit(random_prompt(7 * chunk - 1, seed=7), on=2, helpers=[0, 1])
        nodes.until(lambda: len(stream.output()) > 2)
        num_held, each = last.pool.num_blocks - last.pool.num_free, last.pool.windows.num_each
        in_window = last.pool.window.most_held(1)
        assert num_held <= -(-(7 * chunk + len(stream.output())) // BLOCK) + 1 + each * in_window
        nodes.cancel(stream, on=2)
        nodes.client.wait(stream)
        nodes.sampling = LOGPROBS
        longer = prompt + random_prompt(4 * chunk - 4, seed=8)
        nodes.ask(longer, on=2, helpers=[0])
        assert last.logic.scheduler.state.num_cached_tokens >= 6 * chunk, "what came was kept"
        assert nodes.count(2, "shared_begun") == 3


def test_three_nodes_beside_streams() -> None:
    """In two rounds, with a stream on each of them, which goes on: each step has one row more."""
    prompt = random_prompt(7 * CHUNK - 1, seed=6)
    with make_nodes("unified", "unified", "unified", transport="shm", chunk=CHUNK) as nodes:
        nodes.sampling = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
        streams = [nodes.submit(random_prompt(BLOCK, seed=7 + node), on=node) for node in range(3)]
        nodes.until(lambda: all(stream.tokens for stream in streams))
        nodes.sampling = LOGPROBS
        alone = nodes.ask(prompt, on=0)
        nodes.client.send(nodes.nodes[0].info, FlushBlocks())
        together = nodes.ask(prompt, on=2, helpers=[0, 1])
        assert nodes.count(2, "shared_tokens") == 4 * CHUNK
        assert together.logprobs == alone.logprobs
        nodes.ask(prompt + random_prompt(2 * BLOCK, seed=8), on=2)
        assert nodes.nodes[2].process.logic.scheduler.state.num_cached_tokens >= 6 * CHUNK, "what came was kept"
        for node, stream in enumerate(streams):
            nodes.cancel(stream, on=node)
        nodes.client.wait(*streams)


def test_what_comes_wrong_costs_the_attempt_and_is_never_told() -> None:
    changes = {0: {"fault_injection": "corrupt:*"}}
    with make_nodes("unified", "unified", transport="shm", changes=changes, chunk=CHUNK) as nodes:
        before_last_layer(nodes, 0, nothing)
        check_that_it_costs_the_attempt(nodes)


def test_samples_that_part_where_their_prompt_is_computed_never_stand_behind_what_comes_wrong() -> None:
    changes = {0: {"fault_injection": "corrupt:*"}}
    with make_nodes("unified", "unified", transport="shm", changes=changes, chunk=CHUNK) as nodes:
        before_last_layer(nodes, 0, nothing)
        helper, own = (node.info for node in nodes.nodes)
        result = nodes.client.submit("r", PROMPT, nodes.sampling, decode=own, samples=(0, 1), helpers=[helper])
        nodes.client.wait(result)
        assert result.failed is None, f"{result.failed}, having told {result.tokens}"
        assert result.output(0) == result.output(1)
        nodes.check(result, PROMPT)
        nodes.ask(PROMPT, on=1)


@pytest.mark.parametrize("round", [1, 2])
def test_a_helper_that_fails_in_the_middle_costs_the_attempt(round: int) -> None:
    begun = set()

    def fail(job: BlockPush) -> None:
        begun.add(job.grant_id)
        if len(begun) == round:
            raise TransportError("cut")

    with make_nodes("unified", "unified", transport="shm", chunk=CHUNK) as nodes:
        before_last_layer(nodes, 0, fail)
        check_that_it_costs_the_attempt(nodes)


def test_a_cancelled_prompt_leaves_nothing_at_its_helper() -> None:
    changes = {0: {"fault_injection": "delay:0.2"}}
    with make_nodes("unified", "unified", transport="shm", changes=changes, chunk=CHUNK) as nodes:
        cancelled = nodes.submit(PROMPT, on=1, helpers=[0])
        nodes.until(lambda: nodes.count(1, "shared_begun") == 1)
        nodes.cancel(cancelled, on=1)
        nodes.client.wait(cancelled)


def test_a_node_that_has_other_prompts_declines_without_deadlines() -> None:
    with make_nodes("unified", "unified", transport="shm", chunk=CHUNK) as nodes:
        nodes.nodes[0].hold_after(0)
        busy = nodes.submit(random_prompt(BLOCK, seed=7), on=0)
        nodes.until(lambda: bool(nodes.nodes[0].process.logic.scheduler.state.queues.waiting))
        nodes.ask(PROMPT, on=1, helpers=[0])
        assert (nodes.count(1, "shared_begun"), nodes.count(1, "shared_declined")) == (0, 1)
        nodes.nodes[0].go_on()
        nodes.client.wait(busy)


def test_with_deadlines_nodes_help_each_other_beside_their_own_prompts() -> None:
    promised = {"ttft_target_ms": 60_000, "tpot_target_ms": 60_000}
    with make_nodes("unified", "unified", transport="shm", chunk=CHUNK, **promised) as nodes:
        own = [nodes.submit(random_prompt(ROUNDS, seed=70 + index), on=index) for index in (0, 1, 0, 1)]
        prompts = [random_prompt(ROUNDS, seed=80 + index) for index in range(2)]
        results = [nodes.submit(prompt, on=index, helpers=[1 - index]) for index, prompt in enumerate(prompts)]
        nodes.client.wait(*own, *results)
        for prompt, result in zip(prompts, results, strict=True):
            nodes.check(result, prompt)
        assert [nodes.count(index, "shared_begun") for index in (0, 1)] == [1, 1]


@pytest.mark.parametrize("num_rounds", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_two_full_nodes_that_help_each_other_at_once(num_rounds: int) -> None:
    """In opposite order, with room for one and a half prompts on each: whoever lacks room computes alone."""
    with make_nodes("unified", "unified", transport="shm", num_blocks=17, chunk=CHUNK) as nodes:
        for turn in range(num_rounds):
            prompts = [random_prompt(ROUNDS, seed=100 + 2 * turn + index) for index in range(2)]
            results = [nodes.submit(prompt, on=index, helpers=[1 - index]) for index, prompt in enumerate(prompts)]
            nodes.client.wait(*results)
            for prompt, result in zip(prompts, results, strict=True):
                nodes.check(result, prompt)


def test_a_helper_dies() -> None:
    """Before it has agreed the prompt is computed alone; after, the attempt fails and another may follow."""
    child = NodeChild(("prefill",), "shm", "die:2")
    try:
        info = greet(child.addresses[0])
        with make_nodes("unified", transport="shm", chunk=CHUNK) as nodes:
            result = nodes.submit(PROMPT, on=0, helper_infos=[info])
            nodes.client.wait(result)
            assert child.process.wait(60) == -signal.SIGKILL, "the fault did not strike: this test shows nothing"
            if result.failed is None:
                nodes.check(result, PROMPT)
            else:
                assert (result.failed.code, result.failed.retryable, result.tokens) == ("help_lost", True, {})
            nodes.ask(PROMPT, on=0)
    finally:
        child.stop()
