"""Real nodes whose device pool is too small for what they are asked: KV comes back from host memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tier_nodes import (
    LENGTHS,
    NUM_BLOCKS,
    NUM_HITS,
    SAMPLING,
    Asker,
    References,
    always_loading,
    make_references,
    until_saved,
)
from waiting import PATIENCE_S

from in_process_cluster import Client, Node, node_options, whole_at_the_end
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.requests import FlushBlocks
from tandem.kv_connector.tiers import ways, write_back
from tandem.node import report
from tiny_models import random_prompt, reference_greedy, tiny_model

BLOCK_BYTES = 12288


@pytest.fixture(scope="module")
def references() -> References:
    return make_references()


@pytest.fixture
def single(references: References) -> Iterator[Asker]:
    asker = Asker(always_loading(Node(node_options("unified", tiny_model("llama"), num_blocks=NUM_BLOCKS))))
    (node,) = asker.nodes
    yield asker
    asker.client.close()
    node.wait_until_whole()
    node.stop()
    node.process.tiers.manager.check_integrity()


@contextmanager
def asker_of(*nodes: Node) -> Iterator[Asker]:
    """Nodes that are whole at the end."""
    asker = Asker(*nodes)
    with whole_at_the_end(nodes, asker.client):
        yield asker


def small_prefill() -> list[NodeOptions]:
    """Of a decode node and a prefill node, whose pool is too small for what it is asked."""
    counts = {"decode": 96, "prefill": 24}
    return [node_options(role, tiny_model("llama"), num_blocks=counts[role]) for role in counts]


# README says: "goes to host memory"
def test_evicted_prompts_come_back_from_host_memory(single: Asker, references: References) -> None:
    (node,) = single.nodes
    for wanted in references:
        single.ask(wanted)
        until_saved(node)
    assert single.counts(node)["tier_host_hits"] == 0
    for wanted in references:
        single.ask(wanted)
        until_saved(node)
    assert single.counts(node)["tier_host_hits"] >= NUM_HITS
    assert single.counts(node)["tier_saves_torn"] == 0


def test_beside_others_they_are_loaded_outside_the_batch(single: Asker, references: References) -> None:
    (node,) = single.nodes
    for wanted in references:
        single.ask(wanted)
        until_saved(node)
    for _ in range(3):
        single.ask(*references)
    assert single.counts(node)["tier_host_hits"] >= 17
    assert single.counts(node)["tier_loads_failed"] == 0


def test_flush_empties_them(single: Asker, references: References) -> None:
    (node,) = single.nodes
    for wanted in references:
        single.ask(wanted)
        until_saved(node)
    single.client.send(node.info, FlushBlocks())
    for wanted in references:
        single.ask(wanted)
    assert single.counts(node)["tier_host_hits"] == 0


def test_a_prefill_node_hands_on_what_it_loads(references: References) -> None:
    """Under the forward pass too: what is pushed is what was loaded."""
    nodes = [always_loading(Node(each)) for each in small_prefill()]
    with asker_of(*nodes) as asker:
        for _ in range(2):
            for wanted in references:
                asker.ask(wanted)
                until_saved(nodes[1])
                asker.client.send(nodes[0].info, FlushBlocks())
        assert asker.counts(nodes[1])["tier_host_hits"] >= NUM_HITS


def test_a_prefill_node_saves_what_its_prompts_push_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that have nothing in common, so that only they take blocks."""
    monkeypatch.setattr(write_back, "SAVED_AHEAD", 0)
    monkeypatch.setattr(ways, "WAY_S", PATIENCE_S)
    nodes = [Node(each) for each in small_prefill()]
    with asker_of(*nodes) as asker:
        prompts = [random_prompt(LENGTHS[0], seed=number) for number in range(8)]
        asker.ask(*((each, reference_greedy(tiny_model("llama"), each, SAMPLING.max_tokens)) for each in prompts))
        assert asker.counts(nodes[1])["tier_saves"] > NUM_HITS
        assert asker.counts(nodes[1])["tier_blocks_lost"] == 0


@pytest.mark.parametrize(("hosts", "is_loaded"), [(("a", "b"), True), (("a", "a"), False)])
def test_a_decode_node_need_not_be_sent_what_its_host_memory_has(
    references: References, monkeypatch: pytest.MonkeyPatch, hosts: tuple[str, str], is_loaded: bool
) -> None:
    """Where it would have to come from another host."""
    names = iter(hosts)
    monkeypatch.setattr(report, "host_id", lambda: next(names))
    counts = {"decode": 24, "prefill": 96}
    options = [node_options(role, tiny_model("llama"), num_blocks=counts[role], transport="tcp") for role in counts]
    nodes = [always_loading(Node(each)) for each in options]
    with asker_of(*nodes) as asker:
        for wanted in references:
            asker.ask(wanted)
            until_saved(nodes[0])
        before = nodes[1].process.transfer.counters["kv_pushed_bytes"]
        for wanted in references:
            asker.ask(wanted)
            until_saved(nodes[0])
        num_pushed = (nodes[1].process.transfer.counters["kv_pushed_bytes"] - before) / BLOCK_BYTES
        assert (asker.counts(nodes[0])["tier_host_hits"] >= NUM_HITS) == is_loaded
        assert num_pushed <= len(references) if is_loaded else num_pushed >= NUM_HITS


def test_none_where_they_are_turned_off() -> None:
    for changes in ({"host_tier_bytes": 0}, {"caching": False}):
        node = Node(node_options("unified", tiny_model("llama"), **changes))
        assert node.process.tiers is None
        node.stop()


def test_a_tier_of_fp8_restores_what_an_fp8_pool_would_hold() -> None:
    """Beside exact KV, logits of restored blocks are off by no more than those of a node that computes in fp8 KV."""
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    fp8_pool = Node(node_options("unified", tiny_model("llama"), num_blocks=NUM_BLOCKS, kv_cache_dtype="fp8_e4m3"))
    fp8_tier = always_loading(
        Node(node_options("unified", tiny_model("llama"), num_blocks=NUM_BLOCKS, host_tier_dtype="fp8_e4m3"))
    )
    try:
        exact, restored = first_logprobs(fp8_tier, prompts), first_logprobs(fp8_tier, prompts)
        assert fp8_tier.process.tiers.manager.counts()["tier_host_hits"] >= NUM_HITS
        assert restored != exact, "nothing was compressed"
        cached = [first_logprobs(fp8_pool, prompts) for _ in range(2)][-1]  # its own prefixes, read back as fp8
        assert furthest(restored, exact) <= 1.5 * furthest(cached, exact)
    finally:
        fp8_pool.stop()
        fp8_tier.stop()


def first_logprobs(node: Node, prompts: list[list[int]]) -> list[dict[int, float]]:
    """Of the most likely first tokens after each prompt, asked one after the other."""
    client, found = Client(node.info), []
    sampling = SamplingParams(max_tokens=1, temperature=0.0, num_logprobs=20)
    for prompt in prompts:
        result = client.submit(secrets.token_hex(8), prompt, sampling, decode=node.info)
        client.wait(result)
        until_saved(node)
        (entry,) = result.logprobs[0]
        found.append(dict(zip(entry.token_ids, entry.logprobs, strict=True)))
    client.close()
    return found


def furthest(some: list[dict[int, float]], others: list[dict[int, float]]) -> float:
    """The largest difference of a token's log-probability."""
    pairs = [(a[token], b[token]) for a, b in zip(some, others, strict=True) for token in a.keys() & b.keys()]
    assert len(pairs) >= 15 * len(some)
    return max(abs(a - b) for a, b in pairs)
