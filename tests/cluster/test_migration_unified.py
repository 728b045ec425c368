"""A unified node that drains hands its streams to another unified node, or to a decode node, behind a real router."""

from __future__ import annotations

import re
from typing import Any

import pytest
from router_in_thread import RouterInThread
from split_pair import GREEDY, Alone, changed
from stream_client import Stream
from waiting import wait_until

from in_process_cluster import FAST, Node, node_options
from tandem.engine.contracts.sampling_params import SamplingParams
from tiny_models import random_prompt, tiny_model

LENGTH = 150
DRAWN: dict[str, Any] = {"temperature": 0.8, "seed": 77, "top_p": 0.9, "repetition_penalty": 1.1}


def num_moved(router: RouterInThread) -> int:
    """Streams that have gone on at another node. The nodes count less: a stream may go on, and be cancelled where it
    was, before its new node's commit has come there."""
    found = re.search(
        r"^tandem_router_migration_pause_seconds_count (\S+)$", router.client.get("/metrics").text, re.MULTILINE
    )
    return int(float(found[1])) if found else 0


@pytest.mark.parametrize("role", ["unified", "decode"])
def test_streams_go_on_where_it_hands_them(role: str, alone: Alone) -> None:
    folder, prompts = tiny_model("llama"), [random_prompt(90, seed=71), random_prompt(40, seed=72)]
    first = Node(node_options("unified", folder, transport="shm"))
    nodes = [first, Node(node_options(role, folder, transport="shm"))]
    try:
        with RouterInThread(folder, (first.info.control_address,), timeouts=FAST) as router:
            router.wait_ready()
            cluster = router.worker.service.cluster
            model = router.client.get("/v1/models").json()["data"][0]["id"]
            first.hold_after(0)
            greedy = Stream(router.url, model, prompts[0], LENGTH)
            pair = Stream(router.url, model, prompts[1], LENGTH, n=2, **DRAWN)
            waiting = first.process.logic.scheduler.state.queues.waiting
            wait_until(lambda: len(waiting) == 2, "both prompts")
            first.hold_after(20)  # they are under way when the second node is there
            for stream, num_samples in ((greedy, 1), (pair, 2)):
                stream.wait_for(10, num_samples)
            router.call(lambda: cluster.add(nodes[1].info.control_address))
            wait_until(lambda: len(cluster.views) == 2, "the second node")
            first.process.loop.begin_drain()
            results = [greedy.finish(), pair.finish()]
            moved = num_moved(router)
        nodes[1].wait_until_whole()
    finally:
        for node in reversed(nodes):
            node.stop()
    assert moved == 3, "not all of them were running when they were handed over: this shows nothing"
    assert [results[0][0]] == alone.run(prompts[0], changed(GREEDY, max_tokens=LENGTH))
    sampling = SamplingParams(max_tokens=LENGTH, ignore_eos=True, **DRAWN)
    assert [results[1][0], results[1][1]] == alone.run(prompts[1], sampling, (0, 1))
