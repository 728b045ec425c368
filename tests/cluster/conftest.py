"""Nodes that the tests of one file share; each test that borrowed a pair ends with both its pools whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from scripted_cluster import client, model, nodes, router  # noqa: F401  # fixtures
from split_pair import TWO_WAYS, Alone, Pair, make_pair

from in_process_cluster import Node, node_options
from tiny_models import tiny_model

PairOf = Callable[[str], Pair]


@pytest.fixture(scope="module")
def pair_of() -> Iterator[PairOf]:
    """The file's pair for a way of transport, started when it is first asked for."""
    with ExitStack() as stack:
        started: dict[str, Pair] = {}

        def get(way: str) -> Pair:
            if way not in started:
                started[way] = stack.enter_context(make_pair(way))
            return started[way]

        yield get


def _borrow(pair: Pair) -> Iterator[Pair]:
    pair.renew_client()
    yield pair
    pair.check_whole()


@pytest.fixture(params=TWO_WAYS)
def pair(request: pytest.FixtureRequest, pair_of: PairOf) -> Iterator[Pair]:
    yield from _borrow(pair_of(request.param))


@pytest.fixture
def shm(pair_of: PairOf) -> Iterator[Pair]:
    yield from _borrow(pair_of("shm"))


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    node = Node(node_options("unified", tiny_model("llama")))
    yield Alone(node)
    node.stop()
