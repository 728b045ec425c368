"""Real nodes whose device pool is too small for what they are asked: KV comes back from host memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from in_process_cluster import BLOCK, Client, Node, node_options
from tandem.engine.messages import FlushBlocks
from tandem.engine.sampling_params import SamplingParams
from tiny_models import Greedy, random_prompt, reference_greedy, tiny_model

SAMPLING = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
NUM_BLOCKS = 24  # room for one prompt and its output
LENGTHS = (17 * BLOCK + 5, 18 * BLOCK, 19 * BLOCK + 1)


@pytest.fixture(scope="module")
def references() -> dict[int, tuple[list[int], Greedy]]:
    prompts = {length: random_prompt(length, seed=length) for length in LENGTHS}
    return {n: (p, reference_greedy(tiny_model("llama"), p, SAMPLING.max_tokens)) for n, p in prompts.items()}


def until_saved(node: Node) -> None:
    """Until everything cached in the device pool is in the host pool as well."""
    pool, manager, deadline = node.process.pool, node.process.tiers.manager, time.monotonic() + 10
    while not (pool.cached_hashes() and all(manager.is_on_host(each) for each in pool.cached_hashes())):
        assert time.monotonic() < deadline, "an idle node does not save"
        time.sleep(0.01)


def always_loading(node: Node) -> Node:
    """Whatever the machine's load makes of the rates."""
    node.process.tiers.manager.compute_seconds_per_token = lambda: 0.0
    return node


class Asker:
    def __init__(self, *nodes: Node) -> None:
        self.nodes, self.client, self._count = nodes, Client(*(node.info for node in nodes)), 0

    def ask(self, *wanted: tuple[list[int], Greedy]) -> list[int]:
        """All at once; prompt tokens found in caches, of each."""
        self._count += 1
        decode, prefill = self.nodes[0].info, self.nodes[1].info if len(self.nodes) > 1 else None
        results = [
            self.client.submit(f"{self._count}-{index}", prompt, SAMPLING, decode=decode, prefill=prefill)
            for index, (prompt, _) in enumerate(wanted)
        ]
        self.client.wait()
        for result, (_, greedy) in zip(results, wanted, strict=True):
            assert result.failed is None, result.failed
            assert result.output() == greedy.token_ids
        return [result.num_cached_tokens for result in results]

    def counts(self, node: Node) -> dict[str, float]:
        return node.process.tiers.manager.counts()


@pytest.fixture
def single(references: dict) -> Iterator[Asker]:
    asker = Asker(always_loading(Node(node_options("unified", tiny_model("llama"), num_blocks=NUM_BLOCKS))))
    (node,) = asker.nodes
    yield asker
    asker.client.close()
    node.wait_until_whole()
    node.stop()
    node.process.tiers.manager.check_integrity()


def test_evicted_prompts_come_back_from_host_memory(single: Asker, references: dict) -> None:
    (node,) = single.nodes
    for wanted in references.values():
        single.ask(wanted)
        until_saved(node)
    assert single.counts(node)["tier_host_hits"] == 0
    for wanted in references.values():
        single.ask(wanted)
        until_saved(node)
    assert single.counts(node)["tier_host_hits"] >= 17 + 17 + 19
    assert single.counts(node)["tier_saves_torn"] == 0


def test_beside_others_they_are_loaded_outside_the_batch(single: Asker, references: dict) -> None:
    (node,) = single.nodes
    for wanted in references.values():
        single.ask(wanted)
        until_saved(node)
    for _ in range(3):
        single.ask(*references.values())
    assert single.counts(node)["tier_host_hits"] >= 17
    assert single.counts(node)["tier_loads_failed"] == 0


def test_flush_empties_them(single: Asker, references: dict) -> None:
    (node,) = single.nodes
    for wanted in references.values():
        single.ask(wanted)
        until_saved(node)
    single.client.send(node.info, FlushBlocks())
    for wanted in references.values():
        single.ask(wanted)
    assert single.counts(node)["tier_host_hits"] == 0


def test_a_prefill_node_hands_on_what_it_loads(references: dict) -> None:
    """Under the forward pass too: what is pushed is what was loaded."""
    options = [
        node_options(role, tiny_model("llama"), num_blocks=count) for role, count in (("decode", 96), ("prefill", 24))
    ]
    nodes = [always_loading(Node(each)) for each in options]
    asker = Asker(*nodes)
    try:
        for _ in range(2):
            for wanted in references.values():
                asker.ask(wanted)
                until_saved(nodes[1])
                asker.client.send(nodes[0].info, FlushBlocks())
        assert asker.counts(nodes[1])["tier_host_hits"] >= 17 + 17 + 19
        for node in nodes:
            node.wait_until_whole()
    finally:
        asker.client.close()
        for node in reversed(nodes):
            node.stop()


def test_none_where_they_are_turned_off() -> None:
    for changes in ({"host_tier_bytes": 0}, {"caching": False}):
        node = Node(node_options("unified", tiny_model("llama"), **changes))
        assert node.process.tiers is None
        node.stop()
