"""The writer's process dies in the middle of a write: every request still ends, and the survivors are whole."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import httpx
import pytest
from node_child import NodeChild
from router_in_thread import RouterInThread
from split_pair import NIXL
from waiting import PATIENCE_S, wait_until

from in_process_cluster import FAST, Node, node_options
from tiny_models import check_greedy, random_prompt, tiny_model

NUM_TOKENS = 16
PROMPTS = [random_prompt(length, seed=length) for length in (90, 150, 200, 250)]
TIMES = replace(FAST, resend_s=0.1)


@contextmanager
def dying(roles: tuple[str, ...], transport: str, write: int) -> Iterator[NodeChild]:
    child = NodeChild(roles, transport, f"die:{write}")
    try:
        yield child
    finally:
        child.stop()


@contextmanager
def surviving(role: str, transport: str) -> Iterator[Node]:
    node = Node(node_options(role, tiny_model("llama"), transport=transport, timeouts=TIMES))
    try:
        yield node
    finally:
        node.stop()


@contextmanager
def router_over(*addresses: str, connect_s: float = TIMES.connect_s) -> Iterator[RouterInThread]:
    """Connected to every node of `addresses`, so that the requests that follow are spread over them."""
    timeouts = replace(TIMES, connect_s=connect_s)
    with RouterInThread(tiny_model("llama"), addresses, timeouts=timeouts, local_tail_tokens=0) as router:
        wait_until(lambda: len(router.client.get("/ready").json().get("nodes", ())) == len(addresses), "all nodes")
        yield router


def complete_all(router: RouterInThread) -> list[httpx.Response]:
    def one(prompt: list[int]) -> httpx.Response:
        body = {"model": "llama", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        return router.client.post("/v1/completions", json={**body, "return_token_ids": True}, timeout=2 * PATIENCE_S)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


def check_results(answers: list[httpx.Response]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        assert answer.status_code == 200, answer.text
        check_greedy(tiny_model("llama"), prompt, answer.json()["choices"][0]["token_ids"], NUM_TOKENS)


@pytest.mark.parametrize(
    ("way", "spare"),
    [
        pytest.param("shm", True, id="shm-another-prefill-node", marks=pytest.mark.slow),
        pytest.param("shm", False, id="shm-decode-node-alone", marks=pytest.mark.slow),
        pytest.param("tcp", True, id="tcp-another-prefill-node"),
        pytest.param("nixl", False, marks=NIXL.marks, id="nixl-decode-node-alone"),
    ],
)
def test_a_prefill_node_dies_while_it_writes(way: str, spare: bool) -> None:
    """Half of that write has arrived. The next attempt goes to the other prefill node, or the decode
    node computes the prompt itself; its granted blocks are free again once the dead writer is fenced."""
    with dying(("prefill",), way, write=1 if spare else 3) as child, surviving("decode", way) as decode:
        addresses = (*child.addresses, decode.info.control_address)
        with surviving("prefill", way) if spare else nullcontext() as other:
            if other is not None:
                addresses += (other.info.control_address,)
            with router_over(*addresses) as router:
                check_results(complete_all(router))
                router.wait_idle()
            assert child.process.wait(PATIENCE_S) == -signal.SIGKILL, (
                "the fault did not strike: this test shows nothing"
            )
            sink = decode.process.logic.handoffs.sink  # type: ignore[attr-defined]
            decode.wait_until_whole()
            assert sink.ledger.num_quarantined == 0
            assert sink.counters.recomputes == 0, "nothing was ready when the writer died"
            if other is not None:
                other.wait_until_whole()
                assert sink.counters.commits >= 1


def test_both_nodes_of_one_process_die_in_the_middle_of_a_write() -> None:
    """Local transport: writer and pool end together, so all that is left is to say so, in time."""
    with (
        dying(("prefill", "decode"), "local", write=3) as child,
        router_over(*child.addresses, connect_s=1.5) as router,
    ):
        for answer in complete_all(router):
            assert answer.status_code in (502, 503), answer.text
            assert answer.json()["error"]["message"]
        assert child.process.wait(PATIENCE_S) == -signal.SIGKILL
        router.wait_idle()
        assert router.client.get("/ready").status_code == 503
