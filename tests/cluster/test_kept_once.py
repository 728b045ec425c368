"""Nodes that leave to one of them what both hold: answers stay right, also when that one dies."""

from __future__ import annotations

import pytest
from tier_nodes import NUM_BLOCKS, Asker, always_loading, make_references
from waiting import wait_until

from in_process_cluster import Node, node_options
from redis_process import running_redis
from tandem.kv_connector.directory.kept import gives_way
from tiny_models import tiny_model


@pytest.mark.parametrize("has_host_tier", [True, False])
def test_one_of_two_nodes_keeps_what_both_have_and_its_end_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, has_host_tier: bool
) -> None:
    monkeypatch.setattr("tandem.kv_connector.tiers.write_back.SAVED_AHEAD", 4)  # the pool is small
    wanted = make_references()
    first, last = ("a", "b") if gives_way("a", "b") else ("b", "a")
    with running_redis() as server:
        nodes = {
            name: Node(node_options(
                "unified", tiny_model("llama"), node_id=name, redis_url=server.url, keep_kv_once=True,
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
            return {**counters, **process.spare.counters()}[counter]

        try:
            for name in (first, last):
                askers[name].ask(wanted[0])
            kept = nodes[first].process.spare.kept
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
