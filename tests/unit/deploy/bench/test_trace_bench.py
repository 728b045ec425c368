"""Traces: reading them, the pooled bound, simulated nodes by hand-made figures, and whole runs by both ways."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from router_in_thread import VOCAB_SIZE, RouterInThread, make_tokenizer_folder
from waiting import wait_until

from redis_process import running_redis
from stand_in_node import StandInNode
from tandem.deploy.bench.node_figures import NodeReading, hits_by_tier, imbalance_by_role
from tandem.deploy.bench.redis_channel import RedisChannel
from tandem.deploy.bench.request_times import RequestTimes
from tandem.deploy.bench.simulated.cache import TieredCache
from tandem.deploy.bench.simulated.cluster import Simulation
from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.bench.simulated.job import Job
from tandem.deploy.bench.simulated.node import SimulatedNode
from tandem.deploy.bench.simulated.shape import ClusterShape
from tandem.deploy.bench.trace import TRACE_BLOCK, TraceRequest, pooled_hit_rate, read_trace
from tandem.deploy.bench.trace_replay import goodput
from tandem.deploy.bench.trace_report import summarize_jobs
from tandem.deploy.cli import main
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.parts import NO_TARGETS, Targets
from tandem.kv_connector.tiers.index import TierIndex
from tandem.kv_connector.tiers.jobs import JobDone
from tandem.kv_connector.tiers.write_back import WriteBack

FLAT = CostModel(prefill_s_per_token=1e-3, prefill_s_per_token_and_context=0.0, step_s=0.1, sequence_s=0.0,
                 context_s_per_token=0.0, host_s_per_token=1e-4, max_num_batched_tokens=512)  # fmt: skip


def request(at: float, blocks: range | tuple[int, ...], output: int = 1, short: int = 0) -> TraceRequest:
    return TraceRequest(at, TRACE_BLOCK * len(blocks) - short, output, tuple(blocks))


def conversations(num_sessions: int = 31, num_turns: int = 5, gap_s: float = 6.0) -> list[TraceRequest]:
    """Turn k of a session has the blocks of turn k - 1 and two more; all begin with one common block."""
    found = []
    for turn in range(num_turns):
        for session in range(num_sessions):
            own = range(1000 * (session + 1), 1000 * (session + 1) + 3 + 2 * turn)
            found.append(request(turn * gap_s + session * gap_s / num_sessions, (0, *own), output=20, short=100))
    return found


def write(path: Path, requests: list[TraceRequest]) -> str:
    lines = [
        {"timestamp": 1000 * r.arrival_s, "input_length": r.num_prompt_tokens, "output_length": r.num_output_tokens,
         "hash_ids": r.block_ids}
        for r in requests
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


# --- traces ---------------------------------------------------------------------------------------------------


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    requests = conversations(3, 2)
    path = write(tmp_path / "trace", requests)
    assert read_trace(path) == requests
    assert read_trace(path, limit=2) == requests[:2]


@pytest.mark.parametrize(("line", "message"), [
    ("{", "line 2"),
    ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}', "line 2: 513 tokens with 1 blocks"),
])  # fmt: skip
def test_a_broken_trace_names_its_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "trace").write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' + line)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(tmp_path / "trace"))


def test_equal_blocks_are_equal_tokens() -> None:
    one, other = request(0, (1, 2, 3), short=7), request(0, (1, 2, 9))
    first, second = one.token_ids(100), other.token_ids(100)
    assert (len(first), len(second)) == (one.num_prompt_tokens, other.num_prompt_tokens)
    assert first[: 2 * TRACE_BLOCK] == second[: 2 * TRACE_BLOCK]
    assert first[2 * TRACE_BLOCK :] != second[2 * TRACE_BLOCK : len(first)]
    assert len(one.token_ids(100, scale=1 / 64)) == round(one.num_prompt_tokens / 64)


def test_the_pooled_bound_by_hand() -> None:
    """Of three times four blocks the second finds all but a token, the third the two that fit beside its own."""
    trace = [request(0, range(4)), request(1, range(4)), request(2, (0, 1, 8, 9))]
    whole = 4 * TRACE_BLOCK
    assert pooled_hit_rate(trace, 0) == (whole - 1 + whole / 2) / (3 * whole)
    assert pooled_hit_rate([request(0, range(4)), request(1, (9, 8)), request(2, range(4))], whole) == pytest.approx(
        (whole / 2) / (2.5 * whole)
    )


# --- simulated nodes ------------------------------------------------------------------------------------------


def run(node: SimulatedNode) -> None:
    while node.next_at < math.inf:
        node.advance()


def job(trace: TraceRequest) -> Job:
    return Job(trace, trace.block_hashes(), trace.arrival_s)


def test_times_follow_the_cost_model() -> None:
    """Two chunks of 512 tokens at 1 ms each and 0.1 s a step, then nine more tokens at 0.1 s."""
    node = SimulatedNode("n", FLAT, 100 * TRACE_BLOCK, 0)
    first = job(request(0.0, range(2), output=10))
    node.submit(first, 0.0)
    run(node)
    assert first.first_token_at == pytest.approx(2 * (0.512 + 0.1))
    assert first.finished_at == pytest.approx(first.first_token_at + 9 * 0.1)
    assert node.busy_s == pytest.approx(first.finished_at)
    assert node.prefill_s == pytest.approx(1.024)
    assert node.prefill_s_per_token == pytest.approx(0.612 / 512), "as steps took"
    node.check_integrity()


def test_a_prompt_joins_between_two_decode_steps() -> None:
    node = SimulatedNode("n", FLAT, 100 * TRACE_BLOCK, 0)
    long, late = job(request(0.0, range(1), output=11)), job(request(0.85, range(1, 2), short=1))
    node.submit(long, 0.0)
    node.advance()  # its prompt: 0.612
    node.submit(late, 0.85)  # in the third decode step, which ends at 0.912
    run(node)
    assert late.first_token_at == pytest.approx(0.912 + 0.611)
    assert long.finished_at == pytest.approx(0.612 + 10 * 0.1 + 0.511)
    gaps = sorted(node.gaps.elements())
    assert gaps == pytest.approx([0.1] * 9 + [0.611]), "its tokens, one of which the prompt made late"


def test_chats_that_come_to_a_node_make_no_gap_longer_than_the_time_a_token() -> None:
    node = SimulatedNode("n", CostModel(), 100 * TRACE_BLOCK, 0, Targets(0.3, 0.007))
    jobs = [job(TraceRequest(0.05 * each, 256, 60, (each,))) for each in range(8)]
    for each in jobs:
        while node.next_at < each.arrived_at:
            node.advance()
        node.submit(each, each.arrived_at)
    run(node)
    assert max(node.gaps.elements()) <= 0.007, "however far the first streams are ahead of their time by then"
    assert max(node.gaps.elements()) > 0.006, "prompts have what is left of it"
    assert all(each.first_token_at - each.arrived_at <= 0.3 for each in jobs)


def test_hits_cost_nothing_and_host_hits_little() -> None:
    node = SimulatedNode("n", FLAT, 4 * TRACE_BLOCK, 4 * TRACE_BLOCK)
    jobs = [job(request(0.0, range(4))), job(request(0.0, range(8, 10))), job(request(0.0, (0, 1, 2, 3)))]
    for each in jobs:
        node.submit(each, node.next_at if node.next_at < math.inf else 0.0)
        run(node)
        node.next_at = math.inf
    assert jobs[2].hits == {"gpu": 2 * TRACE_BLOCK - 1, "cpu": 2 * TRACE_BLOCK, "peer": 0}
    node.cache.check_integrity()


def full_node(node_id: str) -> SimulatedNode:
    """A node of 40 blocks that has just computed 30, host memory beside it that takes 20 ms a block."""
    costs = dataclasses.replace(FLAT, host_s_per_token=4e-5)
    node = SimulatedNode(node_id, costs, 40 * TRACE_BLOCK, 60 * TRACE_BLOCK)
    node.submit(job(request(0.0, range(30), output=1)), 0.0)
    run(node)
    return node


def test_the_nodes_of_a_prompt_first_save_what_it_pushes_out() -> None:
    """Of 22 blocks that its first node pushes out eight were saved. It computes a chat's prompt meanwhile."""
    block_s = TRACE_BLOCK * 4e-5
    first, helper = full_node("first"), full_node("helper")
    now = 30 * 0.612
    shared, chat = job(request(now, range(100, 132))), job(TraceRequest(now, 100, 1, (900,)))
    shared.places = ("first", "helper")
    first.submit(shared, now)
    helper.submit(shared, now)
    assert first.next_at == pytest.approx(now + 14 * block_s)
    assert helper.next_at == math.inf
    first.submit(chat, now)
    first.advance()
    assert chat.finished_at == pytest.approx(now + 0.2)
    assert shared.num_computed == 0
    first.advance()
    assert shared.table is not None
    now += 14 * block_s
    num_helped = -(-shared.table.ends[shared.table.of(1)[-1]] // TRACE_BLOCK)
    assert first.passed_on() == [shared]
    helper.nudge(shared, now)
    assert helper.next_at == pytest.approx(now + (num_helped - 10 - 8) * block_s)
    assert (first.cache.num_lost, helper.cache.num_lost) == (0, 0)


def test_what_a_prompt_pushes_out_that_is_handed_over_is_saved_first() -> None:
    node = full_node("first")
    now = 30 * 0.612
    moved = job(request(now, range(100, 132)))
    moved.decode_on = "sink"
    node.submit(moved, now)
    assert node.next_at == pytest.approx(now + 14 * TRACE_BLOCK * 4e-5)
    node.advance()
    assert node.next_at == pytest.approx(now + 14 * TRACE_BLOCK * 4e-5 + 0.612)
    assert node.cache.num_held == 32, "all its blocks, at its start"
    assert node.cache.num_lost == 0


def test_what_leaves_the_gpu_is_on_the_host_until_that_is_full() -> None:
    cache = TieredCache(2, 1)
    names = [bytes([n]) * 16 for n in range(4)]
    cache.use(names[:2])
    cache.use(names[2:3])  # pushes the deeper of the two out
    assert cache.match(names[:2]) == (2, 1)
    cache.use(names[3:])
    assert cache.match(names[:1]) == (1, 1)
    assert cache.match(names[1:2]) == (0, 0)
    told: dict[tuple[bytes, str], bool] = {(e.block_hash, e.tier): e.stored for e in cache.events}
    assert {name for (name, tier), stored in told.items() if stored and tier == "gpu"} == set(names[2:])
    assert {name for (name, tier), stored in told.items() if stored and tier == "cpu"} == {names[0]}
    cache.check_integrity()


@pytest.mark.parametrize("num_taken", [4, 8, 14, 20])
def test_what_is_taken_at_once_costs_what_was_not_saved(num_taken: int) -> None:
    """All 20 blocks of the pool are cached: the eight next to go were saved, and others that leave are lost, by the
    pool and the write-back of a node as well."""
    names = [bytes([n]) * 14 for n in range(20)]
    cache = TieredCache(20, 20)
    for name in names:
        cache.use([name])
    cache.hold("a share", num_taken)
    num_left = 20 - max(0, num_taken - 8)
    assert sum(name in cache for name in names) == num_left == num_left_of_a_node(names, num_taken)
    cache.let_go("a share")
    cache.use([b"another"])
    assert cache.num_lost == 20 - num_left, "what was given back goes first"
    cache.check_integrity()


def test_what_is_taken_at_once_costs_nothing_where_it_is_saved_before() -> None:
    """Eight of the 14 that leave were saved; of the others there is time for four, the last that would go."""
    names = [bytes([n]) * 16 for n in range(20)]
    cache = TieredCache(20, 20)
    for name in names:
        cache.use([name])
    assert cache.hold("a share", 14, most_saved=4) == 4
    assert [name in cache for name in names] == [True] * 8 + [False] * 2 + [True] * 10
    assert cache.hold("another", 2, most_saved=4) == 0
    cache.check_integrity()


def num_left_of_a_node(names: list[bytes], num_taken: int) -> int:
    """How many of these, which fill its pool, a node has when so many have been taken at once."""
    size = TRACE_BLOCK // 16
    pool, host = BlockPool(len(names) * size, True), TierIndex(len(names) * size)
    write_back = WriteBack(pool, host, None, lambda event: None, 64)
    for name in names:
        blocks = pool.allocate(size)
        assert blocks is not None
        for index, block_id in enumerate(blocks):
            parent = name + bytes([0, index - 1]) if index else None
            assert pool.register(block_id, name + bytes([0, index]), parent)
        pool.free(blocks, None)
    write_back.on_turn(pool.drain_events(), False)
    while jobs := write_back.drain_jobs():
        for each in jobs:
            write_back.on_done(JobDone(each, 0.0))
        write_back.on_turn([], False)
    assert pool.allocate_grantable(num_taken * size) is not None
    return sum(pool.find(name + b"\0\0") is not None or host.is_ready(name + b"\0\0") for name in names)


def test_an_idle_node_copies_what_host_memory_has_room_for() -> None:
    names = [bytes([n]) * 16 for n in range(20)]
    cache = TieredCache(20, 16)
    for name in names:
        cache.use([name])
    cache.save(100)
    cache.hold("a share", 20)
    assert [name in cache for name in names] == [True] * 16 + [False] * 4
    assert cache.match(names[:1]) == (1, 1)
    cache.check_integrity()


# --- whole runs -----------------------------------------------------------------------------------------------

SHAPE = ClusterShape(num_nodes=3, gpu_tokens=120 * TRACE_BLOCK, host_tokens=120 * TRACE_BLOCK)


def outcome(simulation: Simulation) -> list[tuple[float, float, dict[str, int]]]:
    return [(each.first_token_at, each.finished_at, each.hits) for each in simulation.jobs]


def test_prefix_aware_finds_nearly_what_one_pool_would_and_spreads_it() -> None:
    requests = conversations()
    reports = {}
    for policy in ("prefix_aware", "round_robin"):
        simulation = Simulation(SHAPE, policy)  # type: ignore[arg-type]
        simulation.run(requests)
        assert all(each.finished_at >= each.first_token_at > each.arrived_at for each in simulation.jobs)
        reports[policy] = summarize_jobs(simulation.jobs, simulation.nodes, Targets(2.0, 0.05))
    bound = pooled_hit_rate(requests, 3 * 240 * TRACE_BLOCK)
    assert reports["round_robin"].hit_rate < 0.6 * bound
    assert 0.9 * bound < reports["prefix_aware"].hit_rate <= bound
    assert reports["prefix_aware"].prefill_imbalance < 1.3
    assert reports["prefix_aware"].ttft_s[0] < reports["round_robin"].ttft_s[0]


def test_a_real_redis_changes_nothing() -> None:
    requests = conversations(31, 3)
    in_memory = Simulation(SHAPE, "prefix_aware")
    in_memory.run(requests)
    with running_redis() as server:
        channel = RedisChannel(server.url)
        try:
            through_redis = Simulation(SHAPE, "prefix_aware", channel)
            through_redis.run(requests)
            num_keys = server.client().dbsize()
        finally:
            channel.close()
    assert outcome(through_redis) == outcome(in_memory)
    assert num_keys == 9  # of each node the blocks of both tiers and a sequence number


def test_routers_with_views_of_their_own_find_nearly_as_much() -> None:
    requests = conversations(num_sessions=61, num_turns=4)
    rates = []
    for num_routers in (1, 4):
        shape = ClusterShape(4, SHAPE.gpu_tokens, SHAPE.host_tokens, num_routers)
        simulation = Simulation(shape, "prefix_aware")
        simulation.run(requests)
        rates.append(summarize_jobs(simulation.jobs, simulation.nodes, Targets(2.0, 0.05)).hit_rate)
    assert rates[1] > 0.85 * rates[0]


def test_deadlines_make_room_for_bursts_of_prompts() -> None:
    """Long answers at a target of four times a step's time, and nine prompts in the same instant now and then."""
    promised = Targets(3.0, 0.4)
    requests = [request(0.0, (900 + i,), output=200) for i in range(4)]
    requests += [
        request(8.0 * turn, range(1000 + 100 * turn + 4 * i, 1002 + 100 * turn + 4 * i), output=8)
        for turn in range(1, 4)
        for i in range(9)
    ]
    shares = []
    for targets in (NO_TARGETS, promised):
        shape = ClusterShape(2, 4000 * TRACE_BLOCK, 0, costs=FLAT, targets=targets)
        simulation = Simulation(shape, "least_loaded")
        simulation.run(requests)
        report = summarize_jobs(simulation.jobs, simulation.nodes, promised)
        assert all(job.hits is not None and job.finished_at for job in simulation.jobs)
        shares.append((report.good_share, report.tpot_s[2]))
    assert shares[0][1] > 0.4, "without deadlines a chunk of a prompt beside each token"
    assert shares[1][1] <= 0.4 * 1.05
    assert shares[1][0] > shares[0][0]


def test_nodes_that_fetch_find_what_peers_hold() -> None:
    """Each prompt repeats at once, faster than one node could serve: the others bring it over."""
    shape = ClusterShape(2, 400 * TRACE_BLOCK, 0, costs=CostModel(fetch_s_per_token=1e-6))
    simulation = Simulation(shape, "round_robin")
    simulation.run([request(2.0 * turn, range(20)) for turn in range(4)])
    assert [each.hits["peer"] > 0 for each in simulation.jobs] == [False, True, False, False]


# README says: "it replays a trace on a simulated cluster of N nodes"
def test_the_command_prints_policies_beside_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "trace", conversations(8, 3))
    flags = ["--trace", path, "--simulate", "2", "--policies", "round_robin,prefix_aware", "--redis", "local"]
    assert main(["bench", *flags, "--gpu-tokens", "60000", "--host-tokens", "60000", "--find-speed"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["policy", "round_robin", "prefix_aware"]
    assert "bound, one pooled LRU cache" in lines[4]
    speeds = {line.split(":")[0].strip(): float(line.split(":")[1]) for line in lines[6:]}
    assert speeds["prefix_aware"] >= speeds["round_robin"] > 1
    assert main(["bench", "--simulate", "2"]) == 2
    assert main(["bench", "--trace", path, "--simulate", "2", "--policies", "elastic,fastest"]) == 2
    assert main(["bench", "--trace", path, "--simulate", "2", "--policies", "elastic"]) == 2
    assert main(["bench", "--trace", path, "--simulate", "1+1", "--policies", "elastic", "--deadlines"]) == 0
    assert main(["bench", "--trace", str(tmp_path / "missing"), "--simulate", "2"]) == 2


# --- against a server -----------------------------------------------------------------------------------------


@pytest.fixture
def router(tmp_path: Path) -> Iterator[RouterInThread]:
    nodes = [StandInNode(vocab_size=VOCAB_SIZE, node_id=f"n{index}", max_model_len=4096).start() for index in range(2)]
    folder = make_tokenizer_folder(tmp_path / "tokenizer")
    with RouterInThread(folder, tuple(node.address for node in nodes), placement="round_robin") as router:
        wait_until(lambda: len(router.worker.service.cluster.serving()) == 2, "both nodes")
        yield router
    for node in nodes:
        node.stop()


def test_a_trace_is_replayed_against_a_server(
    router: RouterInThread, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "trace", conversations(4, 2, gap_s=1.0))
    flags = [
        "--trace",
        path,
        "--url",
        router.url,
        "--speed",
        "8",
        "--vocab-size",
        "300",
        "--trace-scale",
        "0.1",
        "--json",
    ]
    assert main(["bench", *flags, "--compare", router.url, "--tpot-target", "9"]) == 0
    first = json.loads(capsys.readouterr().out)
    (second,) = first.pop("compared_with")
    for report in (first, second):
        assert (report["num_requests"], report["num_failed"]) == (8, 0)
        assert report["placement"] == "round_robin"
        assert report["num_output_tokens"] == 8 * 2
        assert sorted(report["busy_s_by_node"]) == sorted(report["computed_tokens_by_node"]) == ["n0", "n1"]
        assert 1 <= report["load_imbalance"]["unified"] < 1.5
        assert 0 < report["hit_rate_bound"] < 1
        assert report["duration_s"] > 0.15
        assert report["good_share"] == 1
        assert report["goodput_per_s"] == pytest.approx(report["requests_per_s"])


def test_goodput_is_what_meets_both_targets() -> None:
    fast, slow_start = RequestTimes(0.0, [0.1, 0.3], 0.3, num_tokens=3), RequestTimes(0.0, [0.5], 0.5, num_tokens=1)
    slow, failed = RequestTimes(0.0, [0.1, 1.1], 1.1, num_tokens=2), RequestTimes(0.0, error="gone")
    targets = Targets(ttft_s=0.2, tpot_s=0.2)
    assert goodput([fast, slow_start, slow, failed], 2.0, targets) == {"goodput_per_s": 0.5, "good_share": 0.25}


def test_hits_by_tier_are_what_nodes_counted_meanwhile() -> None:
    def node(role: str, cached: int, host: int, disk: int, pulled: int) -> NodeReading:
        counters = {"cached_tokens": cached, "tier_host_hit_tokens": host, "tier_disk_hit_tokens": disk}
        return NodeReading(role, defaultdict(float, counters, pull_tokens=pulled))

    before = {"p": node("prefill", 100, 10, 0, 5)}
    after = {"p": node("prefill", 400, 60, 20, 45), "new": node("prefill", 30, 0, 0, 30)}
    assert hits_by_tier(before, after) == {"gpu": 190, "cpu": 50, "disk": 20, "peer": 70}
    assert imbalance_by_role({"p": 3.0, "new": 1.0}, after) == {"prefill": 1.5}
