"""Nodes that leave to one of them what both hold: answers stay right, also when that one dies."""

from __future__ import annotations

from itertools import takewhile

import pytest
from tier_nodes import NUM_BLOCKS, SAMPLING, Asker, always_loading, make_references
from waiting import wait_until

from in_process_cluster import BLOCK, Node, node_options
from redis_process import running_redis
from tandem.kv_connector.directory.kept import gives_way
from tiny_models import random_prompt, reference_greedy, tiny_model

WINDOW_BLOCKS = 2  # which a row of the hybrid model sees before a block's end


ORDERED = ("a", "b") if gives_way("a", "b") else ("b", "a")


@pytest.mark.parametrize("model", ["llama", "qwen2_hybrid"])
@pytest.mark.parametrize("has_host_tier", [True, False])
def test_one_of_two_nodes_keeps_what_both_have_and_its_end_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, has_host_tier: bool, model: str
) -> None:
    monkeypatch.setattr("tandem.kv_connector.tiers.write_back.SAVED_AHEAD", 4)  # the pool is small
    wanted = make_references(model)
    first, last = ORDERED
    with running_redis() as server:
        nodes = {
            name: Node(node_options(
                "unified", tiny_model(model), node_id=name, redis_url=server.url, keep_kv_once=True,
                num_blocks=NUM_BLOCKS, host_tier_bytes=-1 if has_host_tier else 0))
            for name in (first, last)
        }  # fmt: skip
        if has_host_tier:
            for node in nodes.values():
                always_loading(node)
        askers = {name: Asker(node) for name, node in nodes.items()}
        stopped = False

        def left(name: str, counter: str = "tier_blocks_left") -> float:
            process = nodes[name].process
            counters = {} if process.tiers is None else process.tiers.counters()
            return {**counters, **process.kept_once.counters()}[counter]

        try:
            for name in (first, last):
                askers[name].ask(wanted[0])
            kept = nodes[first].process.kept_once.spare.kept
            wait_until(
                lambda: any(each in kept for each in nodes[first].cached_hashes()), "news of what the other keeps"
            )
            wait_until(lambda: left(first, "tier_blocks_given_up") > 0, "its pool to give up some of it first")
            askers[first].ask(wanted[1])  # takes the place of the first
            if has_host_tier:
                wait_until(lambda: left(first) > 0, "some of it to be left to the other")
                assert left(last) == 0
            assert left(last, "tier_blocks_given_up") == 0
            nodes[last].stop()
            stopped = True
            askers[first].ask(wanted[0])
        finally:
            nodes[first].stop()
            if not stopped:
                nodes[last].stop()


def test_what_the_other_has_without_its_window_is_kept() -> None:
    """That one's blocks are all there, but for window blocks that were passed by, which others took: it could begin
    behind the last of its blocks alone."""
    model = tiny_model("qwen2_hybrid")
    [wanted, *_] = make_references("qwen2_hybrid")
    other = random_prompt(13 * BLOCK, seed=13)
    with running_redis() as server:
        nodes = {
            name: Node(node_options(
                "unified", model, node_id=name, redis_url=server.url, keep_kv_once=True, num_blocks=NUM_BLOCKS,
                host_tier_bytes=0))
            for name in ORDERED
        }  # fmt: skip
        first, last = nodes.values()
        try:
            asker = Asker(last)
            asker.ask(wanted)
            asker.ask((other, reference_greedy(model, other, SAMPLING.max_tokens)))
            Asker(first).ask(wanted)
            hashes = first.cached_hashes()
            ends = {hashes[num - 1] for num in range(1, len(hashes) + 1) if num_found(last, hashes[:num]) == num}
            assert set(hashes) <= set(last.cached_hashes())
            assert 0 < len(ends) < len(hashes) - WINDOW_BLOCKS, "the other prompt took all, or nothing of the first"
            kept = first.process.kept_once.spare.kept
            wait_until(lambda: {each for each in hashes if kept.is_end(each)} == ends, "news of where one could begin")
            left = list(takewhile(ends.__contains__, reversed(hashes)))  # what is behind a block goes before it
            wait_until(lambda: {each for each in hashes if first.process.pool.goes_first(each)} == set(left), "those")
            assert 0 < len(left) < len(hashes)
        finally:
            for node in nodes.values():
                node.stop()


def num_found(node: Node, hashes: list[bytes]) -> int:
    pool = node.process.pool
    return len(pool.windows.usable(pool.match_prefix(hashes)))
