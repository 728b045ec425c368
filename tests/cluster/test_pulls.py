"""Real nodes that pull prefixes from each other: the tokens of a node alone, whatever happens on the way."""

from __future__ import annotations

import random
import signal
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
from node_child import NodeChild
from pull_nodes import greet, make_nodes
from split_pair import TWO_WAYS
from tier_nodes import always_loading, until_saved

from in_process_cluster import BLOCK, FAST, Client
from tandem.engine.contracts.wire.requests import FlushBlocks
from tandem.node import report
from tiny_models import random_prompt

PROMPT = random_prompt(9 * BLOCK + 3, seed=5)
NUM_BLOCKS = 9  # of it, whole ones
BLOCK_BYTES = 12288


# README says: "A node that lacks a prefix pulls it from the peer that has it"
@pytest.mark.parametrize("way", TWO_WAYS)
def test_a_single_node_pulls_what_another_has(way: str) -> None:
    with make_nodes("unified", "unified", transport=way) as nodes:
        nodes.ask(PROMPT, on=0)
        nodes.ask(PROMPT, on=1, holder=0)
        assert nodes.count(1, "pull_tokens") == NUM_BLOCKS * BLOCK
        assert nodes.count(0, "pull_served_blocks") == NUM_BLOCKS
        nodes.ask(PROMPT, on=1, holder=0)
        assert nodes.count(1, "pull_asked") == 1, "it was pulled once and is here"
        longer = PROMPT + random_prompt(3 * BLOCK, seed=6)
        nodes.ask(longer, on=1)
        nodes.ask(longer, on=0, holder=1)
        assert nodes.count(0, "pull_tokens") == 3 * BLOCK, "the other way on the same connection, behind its own hits"


@pytest.mark.parametrize("way", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_prefill_node_pulls_from_both_roles_and_hands_on(way: str) -> None:
    """What the decode node made itself, too: the next turn of a conversation."""
    with make_nodes("decode", "prefill", "prefill", transport=way, chunk=64) as nodes:
        first = nodes.ask(PROMPT, on=0, prefill=1)
        turn = PROMPT + first.output() + random_prompt(2 * BLOCK, seed=7)
        nodes.ask(turn, on=0, prefill=2, holder=0)
        assert nodes.count(2, "pull_tokens") == (len(PROMPT) + len(first.output()) - 1) // BLOCK * BLOCK
        nodes.ask(turn, on=0, prefill=1, holder=2)
        assert nodes.count(1, "pull_completed") == 1
        assert nodes.count(0, "sink_commits") == 3


def test_a_prefix_comes_from_the_holders_host_tier() -> None:
    with make_nodes("unified", "unified", transport="shm", changes={0: {"num_blocks": 24}}) as nodes:
        holder = always_loading(nodes.nodes[0])
        nodes.ask(PROMPT, on=0)
        until_saved(holder)
        nodes.ask(random_prompt(20 * BLOCK, seed=8), on=0)  # evicts it
        nodes.ask(PROMPT, on=1, holder=0)
        assert holder.process.tiers.manager.counts()["tier_host_hits"] > 0  # type: ignore[union-attr]
        assert nodes.count(1, "pull_tokens") == NUM_BLOCKS * BLOCK


def test_a_prefix_comes_from_the_holders_disk(tmp_path: Path) -> None:
    """Left there by a process that has ended."""
    disk = {"disk_tier_bytes": 4 << 20, "disk_tier_dir": str(tmp_path)}
    with make_nodes("unified", **disk) as nodes:
        nodes.ask(PROMPT, on=0)
        (node,) = nodes.nodes
        assert node.process.tiers is not None
        manager = node.process.tiers.manager
        nodes.until(lambda: all(map(manager.is_on_disk, node.cached_hashes())))
    with make_nodes("unified", "unified", transport="shm", changes={0: disk}) as nodes:
        always_loading(nodes.nodes[0])
        nodes.ask(PROMPT, on=1, holder=0)
        assert nodes.count(1, "pull_tokens") == NUM_BLOCKS * BLOCK


def test_a_holder_says_honestly_what_it_has() -> None:
    """Less than was hoped, nothing at all, or nothing any more."""
    with make_nodes("unified", "unified", transport="shm", host_tier_bytes=0) as nodes:
        nodes.ask(PROMPT[: 4 * BLOCK], on=0)
        nodes.ask(PROMPT, on=1, holder=0)
        assert nodes.count(1, "pull_tokens") == 4 * BLOCK
        other = random_prompt(6 * BLOCK, seed=9)
        nodes.ask(other, on=1, holder=0)
        nodes.ask(other, on=1)
        nodes.client.send(nodes.nodes[0].info, FlushBlocks())
        nodes.client.send(nodes.nodes[1].info, FlushBlocks())
        nodes.ask(PROMPT, on=1, holder=0)
        assert (nodes.count(1, "pull_completed"), nodes.count(1, "pull_failed")) == (1, 2)


def test_another_salt_finds_nothing() -> None:
    with make_nodes("unified", "unified", transport="shm") as nodes:
        nodes.ask(PROMPT, on=0, salt=b"a" * 16)
        nodes.ask(PROMPT, on=1, holder=0, salt=b"b" * 16)
        nodes.ask(PROMPT, on=1, holder=0)
        assert (nodes.count(1, "pull_completed"), nodes.count(1, "pull_failed")) == (0, 2)
        nodes.ask(PROMPT, on=1, holder=0, salt=b"a" * 16)
        assert nodes.count(1, "pull_completed") == 1


@pytest.mark.parametrize(
    ("way", "fault", "completes"),
    [
        ("shm", "corrupt:1", True),
        ("shm", "drop:*", False),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("shm", "drop:1", True),
                ("shm", "corrupt:*", False),
                ("tcp", "corrupt:1", True),
                ("tcp", "drop:1", True),
                ("tcp", "corrupt:*", False),
                ("tcp", "drop:*", False),
            )
        ),
    ],
)
def test_wrong_bytes_are_sent_again_or_computed(way: str, fault: str, completes: bool) -> None:
    with make_nodes("unified", "unified", transport=way, changes={0: {"fault_injection": fault}}) as nodes:
        nodes.ask(PROMPT, on=0)
        nodes.ask(PROMPT, on=1, holder=0)
        assert nodes.count(1, "sink_digest_mismatches") >= 1
        assert nodes.count(1, "pull_completed") == completes
        assert nodes.count(1, "pull_failed") == (not completes)


@pytest.mark.parametrize("way", ["shm", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_holder_that_is_too_slow_is_not_waited_for(way: str) -> None:
    hasty = replace(FAST, pull_s=0.2)
    changes = {0: {"fault_injection": "delay:1.0"}, 1: {"timeouts": hasty}}
    with make_nodes("unified", "unified", transport=way, changes=changes) as nodes:
        nodes.ask(PROMPT, on=0)
        nodes.ask(PROMPT, on=1, holder=0)
        assert nodes.count(1, "pull_failed") == 1


@pytest.mark.parametrize("way", [pytest.param("shm", marks=pytest.mark.slow), "tcp"])
def test_a_holder_dies_in_the_middle_of_a_write(way: str) -> None:
    child = NodeChild(("prefill",), way, "die:1")
    try:
        info = greet(child.addresses[0])
        with make_nodes("unified", transport=way) as nodes:
            other = Client(info)
            other.wait(other.submit("warm", PROMPT, nodes.sampling, decode=info))
            other.close()
            result = nodes.submit(PROMPT, on=0, holder_info=info)
            nodes.client.wait(result)
            nodes.check(result, PROMPT)
            assert child.process.wait(60) == -signal.SIGKILL, "the fault did not strike: this test shows nothing"
            assert nodes.count(0, "pull_failed") == 1
            assert nodes.count(0, "sink_blocks_quarantined") == NUM_BLOCKS
    finally:
        child.stop()


def test_a_node_that_is_not_there_costs_little() -> None:
    with make_nodes("unified", "unified", transport="shm", pull_s=0.3) as nodes:
        gone = nodes.nodes[0].info.__class__(**{**_fields(nodes.nodes[0].info), "node_id": "gone", "epoch": 7})
        result = nodes.submit(PROMPT, on=1, holder_info=gone)
        nodes.client.wait(result)
        nodes.check(result, PROMPT)
        assert nodes.count(1, "pull_failed") == 1


def test_requests_with_one_prefix_pull_it_once_and_cancels_leave_nothing() -> None:
    with make_nodes("unified", "unified", transport="tcp", changes={0: {"fault_injection": "delay:0.2"}}) as nodes:
        nodes.ask(PROMPT, on=0)
        results = [nodes.submit(PROMPT, on=1, holder=0) for _ in range(3)]
        nodes.client.wait()
        for result in results:
            nodes.check(result, PROMPT)
        assert nodes.count(1, "pull_asked") == 1
        for node in nodes.nodes[1:]:
            nodes.client.send(node.info, FlushBlocks())
        cancelled = nodes.submit(PROMPT, on=1, holder=0)
        nodes.until(lambda: nodes.count(1, "pull_asked") == 2)
        nodes.cancel(cancelled, on=1)
        nodes.client.wait(cancelled)


@pytest.mark.parametrize(
    ("way", "seed", "num_rounds"),
    [
        ("tcp", 2, 12),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("shm", 1, 80), ("tcp", 2, 80), ("local", 3, 80))),
    ],
)
def test_tiny_pools_that_evict_all_the_time(
    way: str, seed: int, num_rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that share prefixes go to random nodes, pulling from others, faults on every way. A pool has room for one
    of them, host memory for two, the disk for a few more, and what can be had is never computed. Over tcp the nodes
    take each other for other hosts'."""
    if way == "tcp":
        monkeypatch.setattr(report, "host_id", lambda hosts=count(): f"host {next(hosts)}")
    rng = random.Random(seed)
    stems = [random_prompt(8 * BLOCK, seed=100 + number) for number in range(3)]
    ends = [random_prompt(BLOCK // 2 + number, seed=number) for number in range(2)]
    tiers = {"host_tier_bytes": 16 * BLOCK_BYTES, "disk_tier_bytes": 40 * (BLOCK_BYTES + 100)}
    changes = {index: {"fault_injection": f"corrupt:{3 + index},drop:{5 + index},duplicate:*"} for index in range(3)}
    common = {"transport": way, "num_blocks": 14, "chunk": 48, "disk_tier_dir": str(tmp_path), **tiers}
    with make_nodes("decode", "prefill", "unified", changes=changes, **common) as nodes:
        managers = [always_loading(node).process.tiers.manager for node in nodes.nodes]  # type: ignore[union-attr]
        last = [0] * len(stems)  # who computed a stem in the round before

        def missing() -> list[str]:
            """What has not come to happen; which it is that does is the machine's to say."""
            found = Counter[str]()
            for index, manager in enumerate(managers):
                found.update({name: count for name, count in manager.counts().items() if count})
                found["pulls"] += int(nodes.count(index, "pull_completed"))
            found["tickets"] = int(nodes.count(0, "sink_ticket_loads"))
            asked = ("tier_host_hit_tokens", "tier_disk_hit_tokens", "tier_host_evictions", "pulls")
            return [name for name in (*asked, "tickets") if not found[name] and (name != "tickets" or way == "tcp")]

        for turn in range(10 * num_rounds):
            if turn >= num_rounds and not missing():
                break
            wanted, latest = [], list(last)
            for _ in range(3):
                stem = rng.randrange(len(stems))
                prompt = stems[stem][: rng.choice((4, 6, 8)) * BLOCK] + rng.choice(ends)
                on, prefill = rng.choice([(0, 1), (0, None), (2, None)])
                computes = on if prefill is None else prefill
                others = [index for index in range(3) if index != computes]
                holder = last[stem] if last[stem] in others else rng.choice(others)
                latest[stem] = computes
                wanted.append((prompt, nodes.submit(prompt, on=on, prefill=prefill, holder=holder)))
            nodes.client.wait()
            last = latest
            for prompt, result in wanted:
                nodes.check(result, prompt)
        assert not missing()


def test_two_nodes_pull_from_each_other_at_once() -> None:
    with make_nodes("unified", "unified", transport="tcp") as nodes:
        for pair in range(6):
            prompts = [random_prompt(9 * BLOCK + 3, seed=100 + 2 * pair + index) for index in range(2)]
            for index, prompt in enumerate(prompts):
                nodes.ask(prompt, on=index)
            results = [nodes.submit(prompt, on=1 - index, holder=index) for index, prompt in enumerate(prompts)]
            nodes.client.wait(*results)
            for result, prompt in zip(results, prompts, strict=True):
                nodes.check(result, prompt)
        assert [nodes.count(index, "pull_completed") for index in range(2)] == [6, 6]


def _fields(info: object) -> dict[str, object]:
    return {name: getattr(info, name) for name in info.__struct_fields__}  # type: ignore[attr-defined]
