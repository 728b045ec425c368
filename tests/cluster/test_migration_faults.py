"""What may happen while a running sequence is on its way: either node dies, the target is full, the client leaves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from node_child import NodeChild
from router_in_thread import RouterInThread
from stream_client import Stream
from waiting import PATIENCE_S, wait_until, wait_until_gone

from in_process_cluster import FAST, Node, node_options
from tiny_models import check_greedy, random_prompt, tiny_model

LENGTH = 200
PROMPT = random_prompt(250, seed=3)
TIMES = replace(FAST, resend_s=0.1)


@dataclass
class World:
    """A router over a prefill node and the decode node that gets the stream; the target comes later."""

    router: RouterInThread
    prefill: Node

    def stream(self, prompt: list[int] = PROMPT) -> Stream:
        stream = Stream(self.router.url, "llama", prompt, LENGTH)
        stream.wait_for(10)
        return stream

    def add(self, address: str) -> None:
        cluster = self.router.worker.service.cluster
        num_nodes = len(cluster.views)
        self.router.call(lambda: cluster.add(address))
        wait_until(lambda: len(cluster.views) > num_nodes, "the target")

    def check_end(self, stream: Stream, prompt: list[int] = PROMPT) -> None:
        check_greedy(tiny_model("llama"), prompt, stream.finish()[0], LENGTH)
        self.router.wait_idle()
        self.prefill.wait_until_whole()


def make_node(role: str, **options: object) -> Node:
    return Node(node_options(role, tiny_model("llama"), transport="shm", timeouts=TIMES, **options))


@contextmanager
def world_of(source_address: str, **options: object) -> Iterator[World]:
    prefill = make_node("prefill")
    addresses = (prefill.info.control_address, source_address)
    try:
        with RouterInThread(tiny_model("llama"), addresses, timeouts=TIMES, local_tail_tokens=0, **options) as router:
            router.wait_ready()
            yield World(router, prefill)
    finally:
        prefill.stop()


@contextmanager
def node(role: str, **options: object) -> Iterator[Node]:
    made = make_node(role, **options)
    try:
        yield made
    finally:
        made.stop()


def counter(node: Node, name: str) -> float:
    return node.process.logic.counters()[f"migrations_{name}"]


def hold_pushes(node: Node) -> threading.Event:
    """Nothing that this node pushes is written before the event is set."""
    pusher, may_push = node.process.transfer._pusher, threading.Event()
    push = pusher.push

    def held(*arguments: Any) -> None:
        may_push.wait(PATIENCE_S)
        push(*arguments)

    pusher.push = held
    return may_push


def test_the_target_dies_while_it_is_written() -> None:
    child = NodeChild(("decode",), "shm", "")
    with node("decode") as source, world_of(source.info.control_address) as world:
        source.hold_after(20)
        may_push = hold_pushes(source)
        stream = world.stream()
        world.add(child.addresses[0])
        source.process.loop.begin_drain()
        wait_until(lambda: counter(source, "started") > 0, "the beginning")
        child.process.kill()
        wait_until_gone(child.process.pid)
        may_push.set()
        source.go_on()
        world.check_end(stream)
        child.stop()
        assert counter(source, "failed") >= 1
        assert counter(source, "finished") == 0
        source.wait_until_whole()


def test_the_source_dies_while_it_writes() -> None:
    child = NodeChild(("decode",), "shm", "die:1", hold_after=20)
    with node("decode") as target, world_of(child.addresses[0]) as world:
        stream = world.stream()
        world.add(target.info.control_address)
        child.drain()
        world.check_end(stream)
        assert child.process.wait(PATIENCE_S) < 0, "the fault did not strike: this test shows nothing"
        child.stop()
        target.wait_until_whole()
        assert target.process.logic.handoffs.sink.ledger.num_quarantined == 0  # type: ignore[attr-defined]


def test_the_client_leaves_meanwhile() -> None:
    with ExitStack() as stack:
        source = stack.enter_context(node("decode"))
        target = stack.enter_context(node("decode"))
        world = stack.enter_context(world_of(source.info.control_address))
        may_push = hold_pushes(source)
        stream = world.stream()
        source.hold_after(0)
        world.add(target.info.control_address)
        source.process.loop.begin_drain()
        wait_until(lambda: counter(source, "started") > 0, "the beginning")
        source.go_on()  # the stream's next token is when its client leaves
        stream.leave()
        world.router.wait_idle()
        may_push.set()
        for each in (source, target, world.prefill):
            each.wait_until_whole()
        assert counter(source, "finished") == 0


def test_a_full_target_leaves_it_where_it_is() -> None:
    """The router believes that there is room: its view is older than what took it."""
    with (
        node("decode") as source,
        node("decode", num_blocks=128) as target,
        world_of(source.info.control_address) as world,
    ):
        source.hold_after(20)
        stream = world.stream()
        target.process.logic.handoffs.sink.line._headroom = 113
        world.add(target.info.control_address)
        source.process.loop.begin_drain()
        wait_until(lambda: counter(source, "started") > 0, "the beginning")
        source.go_on()
        world.check_end(stream)
        assert counter(source, "failed") >= 1
        assert counter(source, "finished") == 0
        target.wait_until_whole()


def test_a_fuller_node_gives_sequences_away() -> None:
    prompts = [random_prompt(120, seed=seed) for seed in range(3)]
    with (
        node("decode", num_blocks=130) as source,
        node("decode", num_blocks=130) as target,
        world_of(source.info.control_address, rebalance_kv=0.2) as world,
    ):
        streams = [world.stream(prompt) for prompt in prompts]
        source.hold_after(0)
        world.add(target.info.control_address)
        wait_until(lambda: counter(source, "finished") > 0, "the first to move")
        source.go_on()
        for stream in streams:
            stream.wait()
        for stream, prompt in zip(streams, prompts, strict=True):
            world.check_end(stream, prompt)
        assert 1 <= counter(source, "finished") <= 2, "all three would turn the difference round"
        for each in (source, target):
            each.wait_until_whole()
