"""Real nodes whose device pool is too small for what they are asked: KV comes back from host memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tier_nodes import NUM_BLOCKS, NUM_HITS, Asker, References, always_loading, make_references, until_saved

from in_process_cluster import Node, node_options
from tandem.engine.messages import FlushBlocks
from tiny_models import tiny_model


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
    options = [
        node_options(role, tiny_model("llama"), num_blocks=count) for role, count in (("decode", 96), ("prefill", 24))
    ]
    nodes = [always_loading(Node(each)) for each in options]
    asker = Asker(*nodes)
    try:
        for _ in range(2):
            for wanted in references:
                asker.ask(wanted)
                until_saved(nodes[1])
                asker.client.send(nodes[0].info, FlushBlocks())
        assert asker.counts(nodes[1])["tier_host_hits"] >= NUM_HITS
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
