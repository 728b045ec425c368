"""Nodes that do all work behind a router that places by the elastic rule."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from router_in_thread import RouterInThread
from split_pair import GREEDY, Alone, changed
from waiting import PATIENCE_S, wait_until

from in_process_cluster import BLOCK, FAST, Client, Node, client_of, node_options
from tandem.engine.contracts.keys import NodeKey
from tandem.router.process.worker import Sources
from tiny_models import random_prompt, tiny_model

LENGTH = 12
CHAT = [random_prompt(length, seed=length) for length in (9, 20, 33, 47)]


@contextmanager
def running(*roles: str, **options: object) -> Iterator[list[Node]]:
    promised = {"ttft_target_ms": 60_000, "tpot_target_ms": 60_000, **options}
    nodes = [Node(node_options(role, tiny_model("llama"), transport="shm", **promised)) for role in roles]
    try:
        yield nodes
    finally:
        for node in reversed(nodes):
            node.stop()


def placed(router: RouterInThread, how: str) -> int:
    found = re.search(
        rf'^tandem_router_placements_total{{reason="elastic: {how}"}} (\S+)$',
        router.client.get("/metrics").text,
        re.MULTILINE,
    )
    return int(float(found[1])) if found else 0


def test_two_nodes_compute_for_each_other_at_the_same_time(alone: Alone) -> None:
    """Each has promised the other blocks of a pool that hardly holds what it computes itself: nobody waits forever."""
    with running("unified", "unified", num_blocks=60) as nodes, client_of(nodes) as client:
        prompts = [random_prompt(length, seed=length) for length in range(120, 200, 5)]
        results = [
            client.submit(f"r{index}", prompt, changed(GREEDY, max_tokens=LENGTH),
                          decode=nodes[index % 2].info, prefill=nodes[1 - index % 2].info)
            for index, prompt in enumerate(prompts)
        ]  # fmt: skip
        client.wait()
        for prompt, result in zip(prompts, results, strict=True):
            assert result.failed is None, result.failed
            assert [result.output()] == alone.run(prompt, changed(GREEDY, max_tokens=LENGTH))
        commits = [node.process.logic.handoffs.sink.counters.commits for node in nodes]
        assert min(commits) == len(prompts) // 2


def test_a_name_is_one_routers_alone(alone: Alone) -> None:
    """Whatever part each node has in the second request: it is told that it gets nothing under this name."""
    prompt = random_prompt(40, seed=1)
    with running("unified", "unified") as nodes, client_of(nodes) as client:
        one, two = (node.info for node in nodes)
        client.wait(client.submit("same", prompt, GREEDY, decode=two, prefill=one))
        other = Client(one, two)
        try:
            refused = other.submit("same", prompt, GREEDY, decode=one, prefill=two)
            other.wait(refused)
            assert refused.failed is not None
            assert (refused.failed.code, refused.failed.retryable) == ("name_taken", True)
            again = other.submit("same", prompt, GREEDY, decode=one, prefill=two, attempt=1)
            other.wait(again)
        finally:
            other.close()
        assert again.failed is None, again.failed
        assert [again.output()] == alone.run(prompt, GREEDY)


def test_work_goes_the_other_way_when_the_mix_does(alone: Alone) -> None:
    """Chat stays where it decodes. Long prompts queue there, so the other node computes some of them; and back."""
    folder = tiny_model("llama")
    with running("prefill", "unified") as nodes:
        addresses = tuple(node.info.control_address for node in nodes)
        with RouterInThread(folder, addresses, timeouts=FAST, placement="elastic") as router:
            router.wait_ready()
            cluster = router.worker.service.cluster
            wait_until(lambda: len(cluster.serving()) == 2, "both nodes")
            model = router.client.get("/v1/models").json()["data"][0]["id"]

            def ask(prompts: list[list[int]]) -> None:
                body = {"model": model, "prompt": prompts, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
                        "return_token_ids": True}  # fmt: skip
                answer = router.client.post("/v1/completions", json=body, timeout=2 * PATIENCE_S)
                assert answer.status_code == 200, answer.text
                for prompt, choice in zip(prompts, answer.json()["choices"], strict=True):
                    assert [choice["token_ids"]] == alone.run(prompt, changed(GREEDY, max_tokens=LENGTH))

            def stays(prompt: list[int]) -> bool:
                before = placed(router, "stays")
                ask([prompt])
                return placed(router, "stays") == before + 1

            def wait_until_chat_stays(what: str) -> None:
                """Until each has. What a token takes is measured, and a busy machine misleads."""
                for prompt in CHAT:
                    wait_until(lambda prompt=prompt: stays(prompt), what)

            wait_until_chat_stays("chat to stay")
            handed = placed(router, "hands over")
            seeds = itertools.count()
            wait_until(
                lambda: (
                    ask([random_prompt(700, seed=next(seeds)) for _ in range(8)]), placed(router, "hands over") > handed
                )[1],
                "somebody else to compute",
            )  # fmt: skip
            wait_until_chat_stays("chat to stay again")

            def plans() -> list[dict]:
                asked = {"model": model, "prompt": CHAT[0], "max_tokens": 5}
                (shown,) = router.client.post("/explain", json=asked).json()["prompts"]
                assert {plan["computes"] for plan in shown["plans"]} == {node.info.node_id for node in nodes}
                return shown["plans"]

            def cheapest() -> set[str]:
                plan = plans()[0]
                return {plan["computes"], plan["decodes"]}

            wait_until(lambda: cheapest() == {nodes[1].info.node_id}, "the cheapest plan to be that chat stays")
            figures = router.client.get("/status").json()["fleet"]
            assert (figures["late_work_seconds"], figures["spare_nodes"] > 0) == (0, True), "all are in time"


class Pools:
    """A directory that knows at any time what the nodes' pools hold."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def longest_prefix(self, block_hashes: Sequence[bytes]) -> dict[NodeKey, int]:
        found = {node.info.key: len(node.process.pool.match_prefix(block_hashes)) for node in self._nodes}
        return {key: length for key, length in found.items() if length}


@pytest.mark.parametrize("roles", [("unified",), ("prefill", "decode")])
def test_a_prompt_waits_for_one_that_begins_as_it_does(
    roles: tuple[str, ...], alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes compute nothing until the second is there: it waits in the router. Alone, a node finds what the first one
    left; of two it depends on the time who computes the second. Waiting is worth it however fast this machine is."""
    monkeypatch.setattr("tandem.router.placing.forerunners.HEARD_S", -2 * PATIENCE_S)
    monkeypatch.setattr("tandem.router.placing.forerunners.WORTH", 1e9)
    folder = tiny_model("llama")
    begin = random_prompt(200, seed=7)
    prompts = [[*begin, *random_prompt(9, seed=seed)] for seed in (1, 2)]
    with running(*roles) as nodes, ThreadPoolExecutor(2) as pool:
        addresses = tuple(node.info.control_address for node in nodes)
        with RouterInThread(
            folder, addresses, Sources(directory=Pools(nodes)), timeouts=FAST, placement="elastic"
        ) as router:
            router.wait_ready()
            service = router.worker.service
            wait_until(lambda: len(service.cluster.serving()) == len(nodes), "all nodes")
            model = router.client.get("/v1/models").json()["data"][0]["id"]

            def ask(prompt: list[int]) -> dict:
                body = {"model": model, "prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
                        "return_token_ids": True}  # fmt: skip
                answer = router.client.post("/v1/completions", json=body, timeout=2 * PATIENCE_S)
                assert answer.status_code == 200, answer.text
                return answer.json()

            for node in nodes:
                node.hold_after(0)
            first = pool.submit(ask, prompts[0])
            wait_until(lambda: len(service.cluster.forerunners) == 1, "the first to be placed")
            second = pool.submit(ask, prompts[1])
            wait_until(lambda: service.num_waiting == 1, "the second to wait")
            for node in nodes:
                node.go_on()
            answers = [each.result(2 * PATIENCE_S) for each in (first, second)]
            for prompt, answer in zip(prompts, answers, strict=True):
                assert [answer["choices"][0]["token_ids"]] == alone.run(prompt, changed(GREEDY, max_tokens=LENGTH))
            found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
            assert found[0] == 0
            assert len(nodes) > 1 or found[1] == len(begin) // BLOCK * BLOCK
            router.wait_idle()
            assert len(service.cluster.forerunners) <= 1, "it is forgotten with the next one"


def test_nodes_lean_the_other_way_when_the_mix_does(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat alone takes both nodes, long prompts alone bring one back, an operator has the last word; nothing fails."""
    for name, seconds in (("router.placing.leaning.SETTLES_S", 0.5), ("router.placing.leaning.HOLDS_S", 0.2),
                          ("engine.scheduling.work.reporter.LATELY_S", 0.3)):  # fmt: skip
        monkeypatch.setattr(f"tandem.{name}", seconds)
    promised = {"transport": "shm", "ttft_target_ms": 60_000, "tpot_target_ms": 0.2}  # streams always lack time
    folder, names = tiny_model("llama"), ("prefill", "decode")
    nodes = [Node(node_options("unified", folder, node_id=name, leaning=name, **promised)) for name in names]
    try:
        addresses = tuple(node.info.control_address for node in nodes)
        with RouterInThread(folder, addresses, timeouts=FAST, placement="elastic") as router:
            router.wait_ready()
            views = router.worker.service.cluster.serving
            wait_until(lambda: {view.leaning for view in views()} == set(names), "both nodes")
            model = router.client.get("/v1/models").json()["data"][0]["id"]
            seeds = itertools.count()

            def ask(length: int, num_tokens: int, until: Callable[[], bool]) -> None:
                while not until():
                    prompts = [random_prompt(length, seed=next(seeds)) for _ in range(2)]
                    body = {"model": model, "prompt": prompts, "max_tokens": num_tokens, "temperature": 0,
                            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
                    answer = router.client.post("/v1/completions", json=body, timeout=2 * PATIENCE_S)
                    assert answer.status_code == 200, answer.text
                    assert [len(choice["token_ids"]) for choice in answer.json()["choices"]] == [num_tokens] * 2

            def shift(length: int, num_tokens: int, until: Callable[[], bool]) -> None:
                with ThreadPoolExecutor(2) as pool:  # somebody always has work
                    for asked in [pool.submit(ask, length, num_tokens, until) for _ in range(2)]:
                        asked.result(240)

            shift(20, 30, lambda: {view.leaning for view in views()} == {"decode"})
            shift(300, 1, lambda: "prefill" in {view.leaning for view in views()})
            turned = next(view.info.node_id for view in views() if view.leaning == "prefill")
            told = {node["node_id"]: node for node in router.client.get("/status").json()["nodes"]}
            assert told[turned]["leaning_why"].startswith("prompts took")
            assert (
                f'tandem_node_leans_to_prompts{{node="{turned}",role="unified"}} 1.0'
                in router.client.get("/metrics").text
            )
            pinned = router.client.post("/admin/role", json={"node": turned, "role": "decode"}).json()
            assert (pinned["leaning"], pinned["is_pinned"]) == ("decode", True)
            free = router.client.post("/admin/role", json={"node": turned, "role": "unified"}).json()
            assert (free["leaning"], free["is_pinned"]) == ("decode", False)
    finally:
        for node in reversed(nodes):
            node.stop()
