"""Adapters on all ranks: in every rank's memory before rank 0 says that it has one, and no longer than there."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE_S, wait_until

from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.adapters.store import AdapterStore
from tandem.engine.contracts.errors import AdapterError
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.node.ranks.channel import receive_command, send
from tandem.node.ranks.rank_adapters import AdapterFollower, AdapterLeader


class Rank:
    """Another rank, in a thread that does nothing but adapters, with host memory for the latest alone."""

    def __init__(self, end: socket.socket) -> None:
        self.read: list[str] = []
        self.broken = False
        self.store = AdapterStore(self._load, 0)
        follower = AdapterFollower(self.store, end)

        def listen() -> None:
            while (command := receive_command(end)) is not None:
                follower.hear(command)

        threading.Thread(target=listen, daemon=True).start()

    def _load(self, path: str, digest: bytes) -> HostAdapter:
        self.read.append(path)
        if self.broken:
            raise AdapterError(f"{path} is torn")
        return made(path)


def made(path: str) -> HostAdapter:
    return HostAdapter(Path(path).name.encode(), torch.zeros(10), torch.zeros(1, 3, dtype=torch.int32))


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, name.encode())


@pytest.fixture
def ends() -> Iterator[tuple[list[socket.socket], list[socket.socket]]]:
    pairs = [socket.socketpair() for _ in range(2)]
    yield [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    for end, _ in pairs:
        end.close()


def lead(ours: list[socket.socket], within_s: float = PATIENCE_S) -> AdapterLeader:
    store = AdapterStore(lambda path, digest: made(path), 0)
    return AdapterLeader(store, lambda command: send(ours, command), ours, within_s)


def test_ranks_hold_what_rank_0_holds(ends: tuple[list[socket.socket], list[socket.socket]]) -> None:
    ours, theirs = ends
    leader, ranks = lead(ours), [Rank(end) for end in theirs]
    used = leader.get(ref("a"))
    assert all(rank.read == ["a"] for rank in ranks), "before rank 0 says that it has it"
    assert leader.get(ref("a")) is used
    leader.read("b")
    leader.get(ref("c"))
    for rank in ranks:
        assert rank.read == ["a", "b", "c"]
        rank.store.get(ref("a"))
        assert rank.read == ["a", "b", "c"], "what rank 0 uses is in memory, whatever else was read"
    del used
    gc.collect()
    leader.get(ref("d"))
    for rank in ranks:
        wait_until(lambda rank=rank: gc.collect() >= 0 and rank.store.find(b"a") is None, "it lets go")  # type: ignore[misc]
    leader.get(ref("a"))
    assert all(rank.read == ["a", "b", "c", "d", "a"] for rank in ranks)


def test_what_a_rank_cannot_read_is_refused(ends: tuple[list[socket.socket], list[socket.socket]]) -> None:
    ours, theirs = ends
    leader, ranks = lead(ours), [Rank(end) for end in theirs]
    ranks[1].broken = True
    for _ in range(2):
        with pytest.raises(AdapterError, match="rank 2: a is torn"):
            leader.get(ref("a"))
    ranks[1].broken = False
    leader.get(ref("a"))
    assert ranks[1].read == ["a", "a", "a"]


def test_a_rank_that_says_nothing_is_not_waited_for_without_end(
    ends: tuple[list[socket.socket], list[socket.socket]],
) -> None:
    with pytest.raises(AdapterError, match="rank 1: it did not read the adapter in time"):
        lead(ends[0], 0.01).get(ref("a"))
