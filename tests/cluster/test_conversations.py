"""Turns of conversations: what was asked and answered before is not computed again, wherever its KV is by now."""

from __future__ import annotations

import pytest
from pull_nodes import Nodes, make_nodes
from tier_nodes import always_loading, until_saved

from in_process_cluster import BLOCK, Node
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import random_prompt

SAMPLING = SamplingParams(max_tokens=2 * BLOCK + 3, temperature=0.0, ignore_eos=True)
SMALL = {"num_blocks": 26}  # room for one conversation


def host_hits(node: Node) -> float:
    assert node.process.tiers is not None
    return node.process.tiers.manager.counts()["tier_host_hits"]


def whole_blocks(tokens: list[int]) -> int:
    """Tokens whose KV the node that made the last of them has in full blocks."""
    return (len(tokens) - 1) // BLOCK * BLOCK


def test_turns_on_one_node_that_has_no_room_for_all_conversations() -> None:
    with make_nodes("unified", transport="local", num_blocks=18) as nodes:
        nodes.sampling = SAMPLING
        (node,) = nodes.nodes
        always_loading(node)
        said: list[list[int]] = [random_prompt(5 * BLOCK + 3, seed=seed) for seed in (1, 2)]
        known = [0, 0]
        for turn in range(4):
            for number in (0, 1):
                result = nodes.ask(said[number], on=0)
                assert result.num_reused_tokens == known[number]
                said[number] = said[number] + result.output()
                known[number] = whole_blocks(said[number])
                said[number] = said[number] + random_prompt(5, seed=10 * turn + number)
                until_saved(node)
        assert host_hits(node) > 20, "nothing was evicted"


@pytest.mark.parametrize("way", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_turns_on_a_pair_whose_decode_node_has_evicted_its_answers(way: str) -> None:
    """The prefill node gets them from host memory of the node that made them: it has seen the questions only."""
    with make_nodes("decode", "prefill", transport=way, changes={0: SMALL}) as nodes:
        nodes.sampling = SAMPLING
        decode = nodes.nodes[0]
        always_loading(decode)
        said, held, seen = random_prompt(5 * BLOCK + 3, seed=3), 0, 0
        for turn in range(3):
            pulled = nodes.count(1, "pull_tokens")
            result = nodes.ask(said, on=0, prefill=1, holder=0 if turn else None)
            assert result.num_reused_tokens == held
            assert nodes.count(1, "pull_tokens") - pulled == held - seen
            seen = len(said) // BLOCK * BLOCK
            said = said + result.output()
            held = whole_blocks(said)
            said = said + random_prompt(5, seed=turn)
            until_saved(decode)
            evict(nodes, turn)
        assert host_hits(decode) > 0, "nothing was evicted"


def evict(nodes: Nodes, turn: int) -> None:
    nodes.ask(random_prompt(20 * BLOCK, seed=100 + turn), on=0)
    until_saved(nodes.nodes[0])
