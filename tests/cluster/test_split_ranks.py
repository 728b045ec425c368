"""Prefill and decode nodes of unlike numbers of ranks: heads split and merged on the way, the tokens of one rank; and
steps that a rank has no memory for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from node_child import NodeChild
from split_pair import GREEDY, SAMPLED, changed
from tiny_hf_models import tiny_hf_model

from in_process_cluster import Client, Node, node_options
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import NodeInfo
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTHS = (1, 17, 64, 150)
MODEL = "qwen3_moe"  # of two KV heads: four ranks hold copies; each decode rank has whole experts
LOST = 41  # tokens of a prompt for which a prefill node's second rank has no memory, once
FAULTS = {33: (1, 1), 34: (0, "sample"), 38: (1, "gather"), 37: (0, 2)}  # of a decode node, by tokens: rank, where
BESIDE = {50: (1, 1), 51: (1, 1)}  # a prompt of 50, alone in its step or beside a sequence


class Nodes:
    """Started when they are first asked for. Those of one rank live in this process."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._infos: dict[tuple[str, str, int], NodeInfo] = {}
        self.own: dict[NodeKey, Node] = {}  # of this process

    def get(self, role: str, transport: str, num_ranks: int) -> NodeInfo:
        key = (role, transport, num_ranks)
        if key not in self._infos:
            if num_ranks == 1:
                node = Node(node_options(role, tiny_model(MODEL), transport=transport, chunk=64))
                self._stack.callback(node.stop)
                self._infos[key], self.own[node.info.key] = node.info, node
            else:
                places = {LOST: (1, 1)} if role == "prefill" else FAULTS | BESIDE
                faults = [{"rank": rank, "num_tokens": n, "at": at} for n, (rank, at) in places.items()]
                whole = {"enable_expert_parallel": role == "decode"}
                child = NodeChild((role,), transport, num_ranks=num_ranks, model=MODEL, faults=faults, **whole)
                self._stack.callback(child.stop)
                self._infos[key] = child.infos[0]
        return self._infos[key]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    yield made
    made.close()


def run_all(decode: NodeInfo, prefill: NodeInfo, sampling: SamplingParams, name: str) -> list[list[int]]:
    client = Client(decode, prefill)
    try:
        results = [
            client.submit(f"{name}{n}", random_prompt(n, seed=n), sampling, decode=decode, prefill=prefill)
            for n in LENGTHS
        ]
        client.wait()
    finally:
        client.close()
    assert [result.failed for result in results] == [None] * len(LENGTHS)
    return [result.output() for result in results]


@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "transport"),
    [
        (2, 1, "shm"),
        (1, 2, "shm"),
        (1, 2, "tcp"),
        *(pytest.param(2, 4, way, marks=pytest.mark.slow) for way in ("shm", "tcp")),
    ],
)
def test_ranks_may_differ(nodes: Nodes, num_prefill: int, num_decode: int, transport: str) -> None:
    """Twice: the second time both sides find what they keep, and push and compute only the rest."""
    prefill = nodes.get("prefill", transport, num_prefill)
    decode = nodes.get("decode", "auto", num_decode)
    sampling = changed(GREEDY, max_tokens=16)
    for turn in range(2):
        name = f"{transport}-{num_prefill}-{num_decode}-{turn}-"
        for length, tokens in zip(LENGTHS, run_all(decode, prefill, sampling, name), strict=True):
            check_greedy(tiny_model(MODEL), random_prompt(length, length), tokens, 16)


def test_drawn_tokens_are_those_of_one_rank(nodes: Nodes) -> None:
    one = run_all(nodes.get("decode", "auto", 1), nodes.get("prefill", "shm", 1), SAMPLED, "drawn-1-")
    many = run_all(nodes.get("decode", "auto", 2), nodes.get("prefill", "shm", 2), SAMPLED, "drawn-2-")
    assert many == one


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1)])
def test_a_running_sequence_moves_to_another_number_of_ranks(nodes: Nodes, here: int, there: int) -> None:
    source, target = nodes.get("decode", "auto", here), nodes.get("decode", "auto", there)
    node = nodes.own.get(source.key)
    length = 500 if node is None else 100
    prompt, sampling = random_prompt(100, seed=40 + here), changed(GREEDY, max_tokens=length)
    client = Client(source, target)
    try:
        if node is not None:  # it is as quick as its peer may be slow to connect
            node.hold_after(20)
        result = client.submit(f"moves-{here}", prompt, sampling, decode=source)
        client.until(lambda: len(result.tokens.get(0, ())) >= 5)
        moved = client.migrate(result, 0, prompt, sampling, source, target)
        client.until(lambda: moved.done and bool(result.migrated))
        if node is not None:
            node.go_on()
    finally:
        client.close()
    assert [message.reason for message in result.migrated] == [""]
    tokens = {**result.tokens[0], **moved.tokens[0]}
    check_greedy(tiny_model(MODEL), prompt, [tokens[i] for i in range(length)], length)


@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1)])
def test_a_prefix_is_pulled_from_another_number_of_ranks(nodes: Nodes, here: int, there: int) -> None:
    asker, holder = nodes.get("decode", "auto", here), nodes.get("decode", "auto", there)
    prompt, sampling = random_prompt(150, seed=50 + here), changed(GREEDY, max_tokens=16)
    client = Client(asker, holder)
    try:
        client.wait(client.submit(f"held-{here}", prompt, sampling, decode=holder))
        result = client.submit(f"pulled-{here}", prompt, sampling, decode=asker, holder=holder)
        client.wait(result)
    finally:
        client.close()
    assert result.num_reused_tokens == 144  # nine blocks of 16
    check_greedy(tiny_model(MODEL), prompt, result.output(), 16)


def figures_after_a_long_prompt(node: NodeInfo, folder: Path) -> dict[str, float]:
    """A node's, once enough of its tokens have chosen experts for them to say how evenly."""
    client, prompt = Client(node), random_prompt(400, seed=9)
    try:
        result = client.submit("long", prompt, changed(GREEDY, max_tokens=8), decode=node)
        client.wait()
        check_greedy(folder, prompt, result.output(), 8)
        client.until(lambda: "expert_imbalance" in client.statuses[node.node_id].counters)
        return dict(client.statuses[node.node_id].counters)
    finally:
        client.close()


def check_experts_of_ranks(figures: dict[str, float]) -> None:
    assert 1 < figures["expert_rank_imbalance"] < figures["expert_imbalance"] < 6


def test_ranks_with_whole_experts_say_how_evenly_they_are_chosen(nodes: Nodes) -> None:
    check_experts_of_ranks(figures_after_a_long_prompt(nodes.get("decode", "auto", 2), tiny_model(MODEL)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shared"), [("deepseek_v2", "prefill"), ("deepseek_v3", "decode"), ("qwen3_moe", "prefill")]
)
def test_whole_experts_on_ranks_beside_all_on_one(kind: str, shared: str) -> None:
    """Of the role `shared` two ranks with half of the experts each, and half of the columns of those that all tokens
    take (DeepSeek); the other node has all."""
    folder = tiny_hf_model(kind) if kind.startswith("deepseek") else tiny_model(kind)
    child = NodeChild((shared,), "shm", num_ranks=2, model=str(folder), enable_expert_parallel=True)
    one = Node(node_options("prefill" if shared == "decode" else "decode", folder, transport="shm", chunk=64))
    infos = {info.role: info for info in (one.info, *child.infos)}
    try:
        outputs = run_all(infos["decode"], infos["prefill"], changed(GREEDY, max_tokens=16), "experts")
        for length, tokens in zip(LENGTHS, outputs, strict=True):
            check_greedy(folder, random_prompt(length, length), tokens, 16)
        if shared == "decode":
            check_experts_of_ranks(figures_after_a_long_prompt(infos["decode"], folder))
    finally:
        one.stop()
        child.stop()


def test_nothing_of_a_lost_step_is_committed(nodes: Nodes) -> None:
    """Some of its layers were pushed. The next attempt finds none of it, on either side."""
    prefill, decode = nodes.get("prefill", "shm", 2), nodes.get("decode", "auto", 1)
    prompt, client = random_prompt(LOST, seed=9), Client(decode, prefill)
    try:
        lost = client.submit("lost", prompt, GREEDY, decode=decode, prefill=prefill)
        client.wait(lost)
        assert lost.failed is not None
        assert lost.failed.code == "out_of_memory"
        client.cancel(*client.key_of(lost), decode, prefill)
        again = client.submit("again", prompt, GREEDY, decode=decode, prefill=prefill)
        client.wait(again)
    finally:
        client.close()
    assert again.num_cached_tokens == 0
    check_greedy(tiny_model(MODEL), prompt, again.output(), 24)


def test_ranks_give_up_a_step_together_and_go_on(nodes: Nodes) -> None:
    """Whichever has no memory, wherever; what runs on the node fails, what comes after it gets its tokens."""
    info = nodes.get("decode", "auto", 2)
    client = Client(info)
    drawn = {"max_tokens": 4, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, num_prompt_logprobs=1)
    try:
        for tokens in FAULTS:
            prompt, first = random_prompt(tokens, tokens), SamplingParams(**drawn, num_prompt_logprobs=tokens % 2)
            lost = client.submit(f"{tokens}-lost", prompt, first, decode=info)
            client.wait(lost)
            assert lost.failed is not None
            assert lost.failed.code == "out_of_memory"
            again = client.submit(f"{tokens}-again", prompt, greedy, decode=info)
            client.wait(again)
            check_greedy(tiny_model(MODEL), prompt, again.output(), 8)
        running = client.submit("running", random_prompt(20, 1), changed(greedy, max_tokens=600), decode=info)
        client.until(lambda: len(running.tokens.get(0, ())) >= 5)
        beside = client.submit("beside", random_prompt(50, 2), greedy, decode=info)
        client.wait(running, beside)
        assert [each.failed and each.failed.code for each in (running, beside)] == ["out_of_memory"] * 2
        again = client.submit("again", random_prompt(20, 1), greedy, decode=info)
        client.wait(again)
        check_greedy(tiny_model(MODEL), random_prompt(20, 1), again.output(), 8)
    finally:
        client.close()
