"""Adapters at a router: served once every node has them, and known to whoever shares a node."""

from __future__ import annotations

import asyncio

import pytest

from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.errors import AdapterError, ConfigError, ModelNotFoundError, UnavailableError
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.adapters import AdapterLoaded, Adapters, AdaptersKnown, LoadAdapter
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.node.adapters import AdapterDesk
from tandem.node.control.events import Found
from tandem.router.nodes.adapters import ServedAdapters, parse_modules

NODES = [NodeKey("one", 1), NodeKey("two", 2)]
ROUTERS = [NodeKey("router-a", 3), NodeKey("router-b", 4)]


class World:
    """Two routers and two nodes' desks, whose messages arrive at once; those to routers that are `slow`, later.
    `answers`: of nodes to LoadAdapter."""

    def __init__(self, *modules: str) -> None:
        self.answers: dict[NodeKey, tuple[bytes, str] | None] = dict.fromkeys(NODES, (b"digest", ""))
        self.desks = {node: AdapterDesk() for node in NODES}
        self.up = set(NODES)
        self.slow: dict[NodeKey, list[tuple[NodeKey, Adapters | AdaptersKnown]]] = {}
        self.routers = {
            router: ServedAdapters(
                LoraOptions(enable_lora=True, lora_modules=modules),
                lambda node, message, router=router: self.to_node(router, node, message),
                lambda: sorted(self.up),
            )
            for router in ROUTERS
        }
        self.a, self.b = self.routers.values()
        for router in ROUTERS:
            for desk in self.desks.values():
                desk.router_up(router)

    def to_node(self, router: NodeKey, node: NodeKey, message: LoadAdapter | Adapters | AdaptersKnown) -> bool:
        desk = self.desks[node]
        if isinstance(message, LoadAdapter):
            if (answer := self.answers[node]) is not None:
                said = AdapterLoaded(path=message.path, stamp=message.stamp, digest=answer[0], problem=answer[1])
                self.routers[router].on_message(node, said)
        elif isinstance(message, Adapters):
            desk.on_names(router, message)
        else:
            desk.on_known(router, message)
        self.deliver(node)
        return True

    def deliver(self, node: NodeKey) -> None:
        for to, told in self.desks[node].drain_outbox():
            assert isinstance(told, Adapters | AdaptersKnown)
            if to in self.slow:
                self.slow[to].append((node, told))
            else:
                self.routers[to].on_message(node, told)


def load(world: World, name: str = "x", within_s: float = 20.0) -> None:
    asyncio.run(world.a.load(name, f"/{name}", sorted(world.up), within_s))


def test_what_one_router_loads_every_router_serves() -> None:
    world = World()
    assert world.b.find("x") is None
    load(world)
    assert world.a.find("x") == world.b.find("x") == AdapterRef("/x", b"digest")
    assert world.b.all() == {"x": "/x"}
    asyncio.run(world.b.unload("x"))
    assert (world.a.find("x"), world.a.all()) == (None, {})
    with pytest.raises(ModelNotFoundError):
        asyncio.run(world.a.unload("x"))


@pytest.mark.parametrize("is_lost", [False, True])
def test_who_loads_is_answered_when_every_router_knows(is_lost: bool) -> None:
    """Any of several processes on one port may take the client's next request."""
    world, slow = World(), ROUTERS[1]
    world.slow[slow] = []

    async def loading() -> None:
        task = asyncio.ensure_future(world.a.load("x", "/x", NODES, 20.0))
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(world.slow[slow]) == len(NODES)
        for node, told in world.slow.pop(slow):
            assert not task.done()
            if is_lost:
                world.desks[node].router_lost(slow)
                world.deliver(node)
            else:
                world.b.on_message(node, told)
        await task

    asyncio.run(loading())
    assert is_lost or world.b.find("x") == AdapterRef("/x", b"digest")


@pytest.mark.parametrize(
    ("answers", "error", "words"),
    [
        ([(b"digest", ""), (b"", "no folder")], AdapterError, r"1 of 2 nodes have it\); two: no folder"),
        ([(b"digest", ""), (b"other", "")], AdapterError, "different files"),
        ([None, (b"digest", "")], UnavailableError, "one did not answer"),
    ],
)
def test_what_not_every_node_has_is_served_by_none(answers: list, error: type, words: str) -> None:
    world = World()
    world.answers = dict(zip(NODES, answers, strict=True))
    with pytest.raises(error, match=words):
        load(world, within_s=0.01)
    assert world.a.find("x") is world.b.find("x") is None


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    world = World()
    world.answers[NODES[1]] = None

    async def losing() -> None:
        loading = asyncio.ensure_future(world.a.load("x", "/x", NODES, 20.0))
        await asyncio.sleep(0)
        world.a.node_lost(NODES[1])
        await loading

    asyncio.run(losing())
    assert world.b.find("x") == AdapterRef("/x", b"digest")


def test_a_router_or_node_that_comes_later_learns_the_names() -> None:
    world = World()
    world.up = {NODES[0]}
    load(world)
    late = World()
    late.desks = world.desks
    late.a.node_up(NODES[1])
    assert late.a.find("x") is None, "this node has heard of nothing"
    late.a.node_up(NODES[0])
    assert late.a.find("x") == AdapterRef("/x", b"digest")
    late.a.node_up(NODES[1])
    assert world.desks[NODES[1]].table.entries == world.desks[NODES[0]].table.entries


def test_listed_adapters_are_known_when_a_node_has_read_them() -> None:
    world = World("x=/x", "y=/y")
    assert world.a.is_unread("x")
    with pytest.raises(UnavailableError):
        world.a.find("x")
    world.a.node_up(NODES[0])
    assert world.a.find("x") == AdapterRef("/x", b"digest")
    world.answers[NODES[1]] = (b"other", "")
    world.a.node_up(NODES[1])
    assert world.a.find("x") == AdapterRef("/x", b"digest"), "the first word stands; the other node refuses"
    asyncio.run(world.a.unload("x"))
    assert world.a.all() == {"y": "/y"}
    assert not world.a.is_unread("x")


def test_a_listed_adapter_that_is_broken_says_why() -> None:
    world = World("x=/x")
    world.answers = dict.fromkeys(NODES, (b"", "/x is no folder"))
    world.a.node_up(NODES[0])
    with pytest.raises(AdapterError, match="no folder"):
        world.a.find("x")


@pytest.mark.parametrize("modules", [("x",), ("=/x",), ("x=",), ("x=/a", "x=/b")])
def test_lists_that_are_none_are_refused(modules: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="lora-modules"):
        parse_modules(LoraOptions(enable_lora=True, lora_modules=modules))
    with pytest.raises(ConfigError, match="--enable-lora"):
        parse_modules(LoraOptions(lora_modules=("x=/a",)))


def test_a_node_without_adapters_says_so() -> None:
    desk = AdapterDesk()
    desk.on_load(ROUTERS[0], LoadAdapter(path="/x", stamp=1), Found())
    ((to, answer),) = desk.drain_outbox()
    assert isinstance(answer, AdapterLoaded)
    assert (to, answer.digest) == (ROUTERS[0], b"")
    assert "--enable-lora" in answer.problem


def test_a_name_that_no_node_has_told_of_yet_may_be_an_adapters() -> None:
    """A process that comes late has a node, and so serves, before it has heard what others have loaded."""
    world = World()
    load(world)
    world.b._table = type(world.b._table)()  # as in a process that was not there
    world.slow[ROUTERS[1]] = []
    world.b.node_up(NODES[0])
    assert world.b.find("x") is None
    assert world.b.is_unread("x")
    assert world.b.is_unread("y")
    for node, told in world.slow.pop(ROUTERS[1]):
        world.b.on_message(node, told)
    assert world.b.find("x") == AdapterRef("/x", b"digest")
    assert not world.b.is_unread("x")
    assert not world.b.is_unread("y"), "nobody knows it"


def test_where_no_adapters_are_served_no_name_may_be_ones() -> None:
    adapters = ServedAdapters(LoraOptions(), lambda node, message: True, lambda: NODES)
    assert not adapters.is_unread("x")
