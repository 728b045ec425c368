"""Prompts that several nodes compute, without I/O: each fault at each moment costs the attempt at most, no token is
ever wrong, every request ends once, and in the end every block is free."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from share_world import BLOCK, CHUNK, LONG_WINDOW, RIGHT, SHORT_WINDOW, ShareWorld

from tandem.engine.blocks.window import NO_WINDOW, BlockWindow
from tandem.engine.contracts.wire.requests import RequestFailed, Tokens
from tandem.kv_connector.pulls.shares import LEAST_PATIENCE_S
from tandem.kv_connector.tiers import write_back
from tandem.kv_connector.tiers.ways import WAY_S
from tandem.kv_connector.tiers.write_back import WriteBack

TWO, THREE = (40, 40), (40, 40, 40)
WINDOWS = {"all alike": NO_WINDOW, "short window": SHORT_WINDOW, "long window": LONG_WINDOW}
with_windows = pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)


def started(*num_blocks: int, window: BlockWindow = NO_WINDOW) -> ShareWorld:
    """The first node has a prompt of two rounds, the others may help."""
    world = ShareWorld(*num_blocks, window=window)
    num_nodes = len(num_blocks)
    world.submit("r", (2 * num_nodes + 1) * CHUNK - 3, 0, range(1, num_nodes))
    return world


def outcome(world: ShareWorld) -> str:
    """How the only request ended, which is not told twice."""
    failed = [each for each in world.told if isinstance(each, RequestFailed)]
    tokens = [t for each in world.told if isinstance(each, Tokens) for sample in each.deltas for t in sample.token_ids]
    assert set(tokens) <= {RIGHT}, "a wrong token was told"
    if failed:
        (only,) = failed
        assert not tokens, "it failed behind what was told"
        assert only.retryable
        return only.code
    return "done" if len(tokens) == 2 else "cancelled"


def ended(world: ShareWorld) -> str:
    world.run()
    world.check_whole()
    return outcome(world)


@with_windows
@pytest.mark.parametrize("num_blocks", [TWO, THREE])
def test_all_chunks_are_computed_once(num_blocks: tuple[int, ...], window: BlockWindow) -> None:
    world = started(*num_blocks, window=window)
    assert ended(world) == "done"
    counters = world.nodes[0].handoffs.shares.counters
    num_nodes = len(num_blocks)
    assert (counters.begun, counters.declined, counters.failed) == (1, 0, 0)
    assert counters.tokens >= 2 * (num_nodes - 1) * (CHUNK - BLOCK)
    first, *helpers = [node.pool.num_cached for node in world.nodes]
    assert first >= (num_nodes + 1) * 2, "what came is kept"
    assert helpers == [0] * (num_nodes - 1), "once"


@with_windows
@pytest.mark.parametrize("num_blocks", [(40, 7), (9, 40)])
def test_without_room_it_is_computed_alone(num_blocks: tuple[int, ...], window: BlockWindow) -> None:
    world = ShareWorld(*num_blocks, window=window)
    if num_blocks[0] < 40:
        world.submit("other", 2 * CHUNK, 0, max_tokens=9)
    world.submit("r", 5 * CHUNK - 3 if num_blocks[0] == 40 else 3 * CHUNK + 3, 0, [1])
    world.run()
    world.check_whole()
    assert not any(isinstance(each, RequestFailed) for each in world.told)


@pytest.mark.parametrize("window", [SHORT_WINDOW, LONG_WINDOW])
def test_who_has_room_only_without_what_slides_out_computes_alone(window: BlockWindow) -> None:
    world = ShareWorld(14, 40, window=window)
    world.submit("stream", CHUNK, 0, max_tokens=25)
    while not world.told:
        for move in world.moves():
            world.do(move)
    world.submit("r", 13 * BLOCK, 0, [1], first=30)
    world.run()
    world.check_whole()
    told = [each.request_id for message in world.told if isinstance(message, Tokens) for each in message.deltas]
    assert "stream" in told[told.index("r") :], "it has waited for the stream's end"
    assert world.nodes[0].handoffs.shares.counters.begun == 0


def nobody_answers(world: ShareWorld) -> None:
    world.post.clear()
    world.tick(LEAST_PATIENCE_S + 1)


FAULTS: dict[str, Callable[[ShareWorld], None]] = {
    "lost": lambda world: world.lose_each_other(world.nodes[0], world.nodes[1]),
    "helpers lost": lambda world: world.lose_each_other(world.nodes[1], world.nodes[-1]),
    "cancelled": lambda world: world.cancel("r", 0),
    "wrong bytes": lambda world: setattr(world, "corrupts", True),
    "message lost": lambda world: world.deliver(is_lost=True) if world.post else None,
    "late": lambda world: world.tick(LEAST_PATIENCE_S + 1),
    "silence": nobody_answers,
    "another prompt": lambda world: world.submit("s", 3 * CHUNK, 1, [0], max_tokens=1),
}


def to_moment(world: ShareWorld, moment: int) -> bool:
    """Brings it there; False: it is over by then."""
    done, world.is_checked = 0, False  # others go this way up to its end
    for _ in range(2000):
        happened = False
        for move in world.moves():
            if done == moment:
                world.is_checked = True
                return True
            if world.do(move):
                happened, done = True, done + 1
        if not happened and all(node.logic.is_empty for node in world.nodes):
            return False
        world.tick(0.0 if happened else 0.1)
    raise AssertionError("a dead end")


def check_each_moment(
    start: Callable[[], ShareWorld], fault: str, every: int, check: Callable[[ShareWorld], None] = lambda world: None
) -> None:
    """The fault at each moment, or some, of the only prompt of a world. `check` looks at the world in the end."""
    ends: dict[str, int] = {}
    for moment in range(0, 1000, every):
        world = start()
        if not to_moment(world, moment):
            break
        FAULTS[fault](world)
        if fault == "another prompt":
            world.run()
            world.check_whole()
            assert not any(isinstance(each, RequestFailed) for each in world.told)
            continue
        end = ended(world)
        ends[end] = ends.get(end, 0) + 1
        check(world)
    assert moment > 40, "little of this showed anything"
    assert set(ends) <= {"done", "cancelled", "help_lost"}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("num_blocks", "every"),
    [(TWO, 7), pytest.param(TWO, 1, marks=pytest.mark.slow), pytest.param(THREE, 1, marks=pytest.mark.slow)],
)
def test_each_fault_at_each_moment(fault: str, num_blocks: tuple[int, ...], every: int) -> None:
    check_each_moment(lambda: started(*num_blocks), fault, every)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    ("num_blocks", "window", "every"),
    [
        (TWO, SHORT_WINDOW, 11),
        (TWO, LONG_WINDOW, 13),
        pytest.param(TWO, LONG_WINDOW, 1, marks=pytest.mark.slow),
        pytest.param(THREE, SHORT_WINDOW, 1, marks=pytest.mark.slow),
    ],
)
def test_each_fault_at_each_moment_with_window_blocks(
    fault: str, num_blocks: tuple[int, ...], window: BlockWindow, every: int
) -> None:
    check_each_moment(lambda: started(*num_blocks, window=window), fault, every)


def started_behind_what_slid_out(window: BlockWindow) -> ShareWorld:
    """What the first node has cached of its prompt has lost window blocks, but for those that are read."""
    world = ShareWorld(*TWO, window=window)
    world.submit("before", 5 * CHUNK + 1, 0)
    for number in range(3):
        world.run()
        world.submit(f"other {number}", 5 * CHUNK, 0, first=30 + 7 * number)
    world.run()
    world.told.clear()
    world.submit("r", 9 * CHUNK - 3, 0, [1])
    return world


@pytest.mark.parametrize("window", [SHORT_WINDOW, LONG_WINDOW])
def test_window_blocks_that_slid_out_are_not_sent(window: BlockWindow) -> None:
    world = started_behind_what_slid_out(window)
    shares, windows = world.nodes[0].handoffs.shares, world.nodes[0].pool.windows
    assert to_moment(world, 8)
    (share,) = shares._shares.values()
    assert not all(map(windows.is_whole, share.blocks_of(0))), "this shows nothing"
    assert ended(world) == "done"
    assert (shares.counters.begun, world.nodes[0].scheduler.state.num_cached_tokens) == (1, 5 * CHUNK)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_each_fault_at_each_moment_behind_what_slid_out(fault: str, every: int) -> None:
    check_each_moment(lambda: started_behind_what_slid_out(SHORT_WINDOW), fault, every)


@pytest.fixture
def nothing_is_saved_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """As good as nothing is of a large pool, in which a long prompt takes thousands of blocks."""
    monkeypatch.setattr(write_back, "SAVED_AHEAD", 0)


def full_of_prompts(num_nodes: int = 2, has_deadlines: bool = False) -> tuple[ShareWorld, list[list[bytes]]]:
    """Nodes whose pools are full of what others asked, with room for that in host memory, and the hashes of it."""
    world = ShareWorld(*[20] * num_nodes, has_deadlines=has_deadlines, num_host=64)
    for on in range(num_nodes):
        for name in range(2):
            world.submit(f"{on} {name}", 5 * CHUNK - 3, on, first=20 * name + 40 * on + 10)
    world.run()
    assert not any(isinstance(each, RequestFailed) for each in world.told)
    world.told.clear()
    return world, [node.pool.cached_hashes() for node in world.nodes]


def num_gone(world: ShareWorld, cached: list[list[bytes]]) -> list[int]:
    """How many of these blocks each node has lost."""
    return [sum(not node.has(each) for each in own) for node, own in zip(world.nodes, cached, strict=True)]


@pytest.mark.parametrize("num_nodes", [2, 3])
@pytest.mark.usefixtures("nothing_is_saved_ahead")
def test_what_a_shared_prompt_pushes_out_is_in_host_memory(num_nodes: int) -> None:
    world, cached = full_of_prompts(num_nodes)
    world.submit("r", 5 * CHUNK - 3, 0, range(1, num_nodes))
    assert ended(world) == "done"
    assert world.nodes[0].handoffs.shares.counters.begun == 1
    assert num_gone(world, cached) == [0] * num_nodes
    pushed_out = [
        sum(node.pool.find(each) is None for each in own) for node, own in zip(world.nodes, cached, strict=True)
    ]
    assert min(pushed_out) >= 4, "little of this showed anything"
    for on, node in enumerate(world.nodes):
        before = node.scheduler.state.num_cached_tokens
        world.submit(f"again {on}", 5 * CHUNK - 3, on, first=40 * on + 10)
        world.run()
        assert node.scheduler.state.num_cached_tokens == before + 9 * BLOCK
    world.check_whole()


@pytest.mark.usefixtures("nothing_is_saved_ahead")
def test_without_that_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WriteBack, "make_way", lambda *_: True)
    world, cached = full_of_prompts()
    world.submit("r", 5 * CHUNK - 3, 0, [1])
    assert ended(world) == "done"
    assert min(num_gone(world, cached)) >= 4


@pytest.mark.usefixtures("nothing_is_saved_ahead")
def test_a_copy_that_stands_holds_up_the_prompt_for_a_moment_and_others_not_at_all() -> None:
    """First the node that has the prompt waits for its time, then the one that helps."""
    world, _ = full_of_prompts()
    world.copies_stand = True
    world.submit("r", 5 * CHUNK - 3, 0, [1])
    world.submit("other", 3, 0, max_tokens=1)
    first = world.nodes[0]

    def steps() -> None:
        for _ in range(50):
            for move in world.moves():
                world.do(move)

    steps()
    assert [delta.request_id for each in world.told for delta in each.deltas] == ["other"]  # type: ignore[union-attr]
    assert first.handoffs.shares.is_idle, "its blocks are not taken"
    world.tick(WAY_S)
    steps()
    assert not first.handoffs.shares.is_idle
    assert first.handoffs.shares.counters.begun == 0
    assert not world.nodes[1].logic.helper.is_idle
    world.tick(WAY_S)
    steps()
    assert first.handoffs.shares.counters.begun == 1
    world.copies_stand = False
    world.run()
    world.check_whole()
    assert not any(isinstance(each, RequestFailed) for each in world.told)


@pytest.mark.usefixtures("nothing_is_saved_ahead")
def test_who_is_asked_and_waits_takes_no_blocks_for_a_peer_that_is_gone_or_when_he_is_to_end() -> None:
    for happens in ("lost", "drained"):
        world, _ = full_of_prompts()
        helper = world.nodes[1]
        world.submit("r", 5 * CHUNK - 3, 0, [1])
        while helper.logic.helper.is_idle:
            for move in world.moves():
                world.do(move)
        assert not helper.logic.is_empty
        if happens == "lost":
            world.lose_each_other(*world.nodes)
        else:
            helper.logic.drain()
        assert ended(world) == "done"
        assert world.nodes[0].handoffs.shares.counters.begun == 0
        assert helper.logic.helper.is_idle


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("nothing_is_saved_ahead")
def test_each_fault_at_each_moment_where_way_is_made(fault: str, every: int) -> None:
    cached: list[list[bytes]] = []

    def start() -> ShareWorld:
        world, cached[:] = full_of_prompts()
        world.submit("r", 5 * CHUNK - 3, 0, [1])
        return world

    def check(world: ShareWorld) -> None:
        if fault not in ("late", "silence"):  # then it has had its time
            assert num_gone(world, cached) == [0, 0]

    check_each_moment(start, fault, every, check)


def test_an_attempt_finds_what_was_verified_when_the_one_before_failed() -> None:
    kept = []
    for moment in range(0, 1000, 3):
        world = started(*TWO)
        if not to_moment(world, moment):
            break
        first = world.nodes[0]
        verified = [share.num_verified_tokens for share in first.handoffs.shares._shares.values() if share.is_engaged]
        world.lose_each_other(world.nodes[0], world.nodes[1])
        if ended(world) == "help_lost":
            assert first.pool.num_cached >= verified[0] // BLOCK
            kept.append(first.pool.num_cached * BLOCK)
            world.submit("r again", 5 * CHUNK - 3, 0)
            world.run()
            world.check_whole()
    assert max(kept) >= 2 * CHUNK, "more than its own first chunk"


@pytest.mark.parametrize("num_seeds", [6, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("nothing_is_saved_ahead")
def test_whatever_happens_among_three_full_nodes(num_seeds: int) -> None:
    """Prompts of all three at once, in any order of events, in pools for one and a half of them. By deadlines nodes
    help beside prompts of their own."""
    for seed in range(num_seeds):
        rng, window = random.Random(seed), list(WINDOWS.values())[seed % 3]
        world = ShareWorld(18, 18, 18, has_deadlines=seed % 2 == 1, num_host=rng.choice([0, 24]), window=window)
        names = iter(range(100))
        for _ in range(300):
            kind = rng.random()
            if kind < 0.04:
                on, *helpers = rng.sample(range(3), rng.choice([2, 3]))
                world.submit(
                    f"r{next(names)}", rng.randrange(3, 6) * CHUNK + 3, on, helpers, max_tokens=rng.randrange(1, 8)
                )
            elif kind < 0.05:
                FAULTS[rng.choice(["wrong bytes", "message lost", "helpers lost"])](world)
            elif kind < 0.15:
                world.tick(rng.choice([0.0, 0.1, 0.6]))
            else:
                moves = world.moves()
                world.do(rng.choice([*moves, *(("launch", node) for node in world.nodes)]))
        world.run()
        world.check_whole()
        for told in world.told:
            assert not isinstance(told, Tokens) or {t for each in told.deltas for t in each.token_ids} <= {RIGHT}
