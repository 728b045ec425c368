"""Router processes of one group hear of each other's placements before the nodes report them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_in_thread import VOCAB_SIZE, RouterInThread, make_tokenizer_folder
from waiting import wait_until

from stand_in_node import StandInNode
from tandem.engine.contracts.config import Timeouts
from tandem.engine.contracts.errors import TandemError
from tandem.router.placing.siblings import Siblings, Told, make_seats

RING = 5


@given(moves=st.lists(st.tuples(st.integers(0, 2), st.booleans() | st.just(RING + 2)), max_size=30))
def test_what_one_tells_each_other_hears_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, moves: list[tuple[int, int]]
) -> None:
    seats = make_seats(tmp_path_factory.mktemp("seats") / "placements", 3, RING)
    processes = [Siblings(seat) for seat in seats]
    unheard: list[dict[int, list[Told]]] = [{other: [] for other in range(3) if other != index} for index in range(3)]
    number = 0
    for index, move in moves:
        if move is True:  # a successor: it goes on where the other stopped, and hears what comes from now on
            processes[index].close()
            processes[index], unheard[index] = Siblings(seats[index]), {other: [] for other in unheard[index]}
        elif move is False:
            assert processes[index].news() == [told for told in unheard[index].values() for told in told[-RING:]]
            unheard[index] = {other: [] for other in unheard[index]}
        for _ in range(0 if isinstance(move, bool) else move):
            number += 1
            told = Told((1 << 64) - number, number, 1, 2 * number, 1, 300, number)
            processes[index].tell(told)
            for other in range(3):
                if other != index:
                    unheard[other][index].append(told)
    for process in processes:
        process.close()


def num_placed(node: StandInNode) -> int:
    return len({submit.request_id for submit in node.submits})


def test_a_router_counts_what_its_sibling_placed_before_the_node_reports_it(tmp_path: Path) -> None:
    folder, seats = make_tokenizer_folder(tmp_path / "tokenizer"), make_seats(tmp_path / "placements", 2)
    slow = Timeouts(heartbeat_s=20.0, peer_lost_s=240.0, connect_s=60.0, drain_s=0.1)
    nodes = [StandInNode(vocab_size=VOCAB_SIZE, hold_tokens=True).start() for _ in range(2)]
    addresses = tuple(node.address for node in nodes)
    with (
        RouterInThread(folder, addresses, seat=seats[0], timeouts=slow) as one,
        RouterInThread(folder, addresses, seat=seats[1], timeouts=slow) as other,
    ):
        cluster = other.worker.service.cluster
        wait_until(lambda: all(len(r.worker.service.cluster.serving()) == 2 for r in (one, other)), "both nodes")
        with ThreadPoolExecutor(4) as threads:
            for turn in range(4):
                router = (one, other)[turn % 2]
                threads.submit(router.client.post, "/v1/completions", json={"prompt": [5] * 200, "max_tokens": 3})
                wait_until(lambda turn=turn: sum(map(num_placed, nodes)) == turn + 1, f"placement {turn}")
                assert num_placed(nodes[0]) == num_placed(nodes[1]) or turn % 2 == 0, "it goes where the other did not"
            other.call(lambda: cluster.tick(time.monotonic()))
            assert [view.num_sequences for view in cluster.views] == [2, 2]
            for router in (one, other):
                router.call(lambda router=router: router.worker.service.abort_all(TandemError("enough")))
    for node in nodes:
        node.stop()
