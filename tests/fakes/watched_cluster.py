"""A split cluster of real nodes under load, to be looked at: what browser tests and pictures of the dashboard share."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from router_in_thread import RouterInThread
from waiting import PATIENCE_S

from in_process_cluster import Node, node_options

DEMO = Path(__file__).resolve().parents[2] / "deploy" / "demo_model"


@contextmanager
def watched_cluster(names: Sequence[str], **options: Any) -> Iterator[RouterInThread]:
    """A router in front of nodes of these names, each of which begins with its role: "prefill-1"."""
    with ExitStack() as stack:
        nodes = []
        for name in names:
            role = name.partition("-")[0]
            nodes.append(Node(node_options(role, DEMO, node_id=name, num_blocks=160, host_tier_bytes=64 << 20)))
            stack.callback(nodes[-1].stop)
        addresses = tuple(node.info.control_address for node in nodes)
        router = RouterInThread(DEMO, addresses, local_tail_tokens=0, **options)
        yield stack.enter_context(router).wait_ready()


def make_request(router: RouterInThread, name: str, num_prompt: int, num_output: int, **fields: Any) -> httpx.Response:
    """One request called `name`, which half of the others begin like."""
    chance = random.Random(name)
    begin = 0 if chance.random() < 0.5 else chance.randrange(10, 500)
    body = {"prompt": [5 + (begin + 7 * i) % 2000 for i in range(num_prompt)], "max_tokens": num_output}
    with httpx.Client(base_url=router.url, timeout=2 * PATIENCE_S) as client:
        headers = dict(router.client.headers) | {"X-Request-Id": name}
        return client.post("/v1/completions", json={**body, "ignore_eos": True, **fields}, headers=headers)


@contextmanager
def load(router: RouterInThread, num_clients: int, pause_s: float) -> Iterator[None]:
    """Clients that ask again and again, `pause_s` after each answer on average, until the context ends."""
    over = threading.Event()

    def ask(index: int) -> None:
        chance = random.Random(index)
        for number in range(10**6):
            lengths = chance.choice((60, 150, 300, 600)), chance.choice((12, 30, 60))
            with contextlib.suppress(httpx.TransportError):
                make_request(router, f"chat-{index}-{number}", *lengths, ttft_target_ms=chance.choice((150, 500, 2000)))
            if over.wait(2 * chance.random() * pause_s):
                return

    clients = [threading.Thread(target=ask, args=(index,), daemon=True) for index in range(num_clients)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join(2 * PATIENCE_S)
