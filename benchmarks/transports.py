"""KV blocks between two processes of this machine, each transport beside its bare counterpart in one run. CPU only.

    python benchmarks/transports.py [--transports shm,nixl,tcp] [--mib 1024] [--rounds 7]

Blocks are 1 MiB and go to other places than they came from. `ours` is what a node does: a BlockPush through the
transfer thread, flushed, without digests. `bare` moves the same blocks the shortest way there is: memcpy into shared
memory; sendall and recv_into on a socket; NIXL writes of the same sizes with the same UCX settings. The two alternate;
the table has medians over the rounds, and the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import queue
import random
import secrets
import socket
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import torch

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.engine.contracts.wire.parts import FirstToken, NodeInfo
from tandem.engine.device.kv_pool import allocate_pool, pool_bytes
from tandem.kv_connector.layouts.geometry import byte_view
from tandem.kv_connector.protocol.jobs import BlockPush, Finalize, ReadySent
from tandem.kv_connector.transfer.thread import TransferWorker
from tandem.kv_connector.transports.links.nixl import MAX_WRITE_BYTES, WINDOW_BYTES
from tandem.kv_connector.transports.links.nixl_agent import NixlAgent, nixl_problem
from tandem.kv_connector.transports.mapped.processes import host_id
from tandem.kv_connector.transports.node_transports import NodeTransports, make_transports

MIB = 1 << 20
LAYOUT = KVLayout((KVGroup(num_layers=16, num_kv_heads=4, head_dim=64, dtype="bfloat16"),), block_size=64)
assert LAYOUT.payload_bytes == MIB


class BenchNode:
    """A pool and the one transport under test."""

    def __init__(self, name: str, transport: str, num_blocks: int) -> None:
        device = torch.device("cpu")
        keys = ClusterKeys(b"only for a benchmark", curve=False)
        self.transports = NodeTransports(make_transports(transport, device, keys, "127.0.0.1", 30.0), transport)
        storage = self.transports.pool_storage(pool_bytes(LAYOUT, num_blocks))
        self.pool = allocate_pool(LAYOUT, num_blocks, device, storage)
        self.pool.view(torch.int16).fill_(1)  # every page exists before anything is timed
        key = NodeKey(name, secrets.randbits(64))
        self.transports.register(self.pool, LAYOUT, key)
        self.info = NodeInfo(
            node_id=key.node_id,
            epoch=key.epoch,
            role="unified",
            host_id=host_id(),
            pid=os.getpid(),
            layout=LAYOUT,
            transports=self.transports.exports(),
        )


class Way(ABC):
    """A way to move blocks. `move` runs on the source: all blocks, `order[i]` of the sink's gets block i."""

    @abstractmethod
    def move(self, order: Sequence[int]) -> None: ...

    def close(self) -> None:  # noqa: B027
        pass


class Ours(Way):
    """Blocks moved as a node moves them: by its transfer thread, over the transport in question."""

    def __init__(self, node: BenchNode, control: Connection) -> None:
        self._node, self._control = node, control
        control.send(("admit", node.info))
        self._sink: NodeInfo = control.recv()
        self._ready: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._transfer = TransferWorker(
            node.pool,
            LAYOUT,
            node.info.key,
            lambda peer, on_lost: node.transports.connect(node.info, peer, on_lost),
            self._ready.put,
            lambda to, message: None,
            lambda *lost: self._ready.put(lost),
        )
        self._transfer.start()
        self._transfer.connect_peer(self._sink)

    def prepare(self, order: Sequence[int]) -> None:
        """Opens the grant, which is not part of what is timed."""
        me, sink = self._node.info, self._sink
        self._grant = KVGrant(
            request_id="bench",
            attempt=0,
            grant_id=secrets.randbits(64),
            source_id=me.node_id,
            source_epoch=me.epoch,
            sink_id=sink.node_id,
            sink_epoch=sink.epoch,
            first_block=0,
            block_ids=tuple(order),
            num_prompt_tokens=len(order) * LAYOUT.block_size,
            lease_s=600.0,
        )
        self._control.send(("open", self._grant))
        self._control.recv()

    def move(self, order: Sequence[int]) -> None:
        key, blocks = ("bench", 0), tuple(range(len(order)))
        valid = (LAYOUT.block_size,) * len(order)
        self._transfer.submit(BlockPush(key, self._grant, blocks, tuple(order), valid, -1))
        first = (FirstToken(0, 1, False),)
        self._transfer.submit(Finalize(key, self._grant, 0, blocks, LAYOUT.block_size, 0, first, with_digests=False))
        event = self._ready.get(timeout=120)
        assert isinstance(event, ReadySent), event

    def close(self) -> None:
        self._transfer.stop(5.0)


class BareMemcpy(Way):
    """Copies into shared memory that the other process has touched."""

    def __init__(self, node: BenchNode, control: Connection) -> None:
        self._blocks = np.frombuffer(byte_view(node.pool), np.uint8).reshape(-1, MIB)
        control.send(("share", None))
        path = control.recv()
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), self._blocks.nbytes)
        self._there = np.frombuffer(self._memory, np.uint8).reshape(-1, MIB)
        self._there[:, ::4096] = 0

    def move(self, order: Sequence[int]) -> None:
        for index, place in enumerate(order):
            np.copyto(self._there[place], self._blocks[index])


class BareSocket(Way):
    """Writes block by block, received in place, one byte back at the end."""

    def __init__(self, node: BenchNode, control: Connection) -> None:
        self._memory = byte_view(node.pool)
        control.send(("socket", None))
        self._sock = socket.create_connection(("127.0.0.1", control.recv()))
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def move(self, order: Sequence[int]) -> None:
        self._sock.sendall(np.array(order, dtype="<u4").tobytes())
        for index in range(len(order)):
            self._sock.sendall(self._memory[index * MIB : (index + 1) * MIB])
        assert self._sock.recv(1) == b"."

    def close(self) -> None:
        self._sock.close()


class BareNixl(Way):
    """Writes requests of MAX_WRITE_BYTES in 1 MiB descriptors, WINDOW_BYTES under way."""

    def __init__(self, node: BenchNode, control: Connection) -> None:
        self._agent = NixlAgent()
        self._agent.register(node.pool)
        self._here = node.pool.data_ptr()
        control.send(("nixl", None))
        metadata, self._there = control.recv()
        self._peer = self._agent.add_peer(metadata)

    def move(self, order: Sequence[int]) -> None:
        group, flying = MAX_WRITE_BYTES // MIB, deque()
        for first in range(0, len(order), group):
            places = order[first : first + group]
            local = [[self._here + (first + i) * MIB, MIB, 0] for i in range(len(places))]
            remote = [[self._there + place * MIB, MIB, 0] for place in places]
            arrays = np.array(local, np.uint64), np.array(remote, np.uint64)
            flying.append(self._agent.start_write(self._peer, arrays[0], "DRAM", arrays[1], "DRAM")[0])
            if len(flying) > WINDOW_BYTES // MAX_WRITE_BYTES:
                self._finish(flying.popleft())
        while flying:
            self._finish(flying.popleft())

    def _finish(self, handle: object) -> None:
        while not self._agent.is_complete(handle):
            time.sleep(20e-6)
        handle.release()  # type: ignore[attr-defined]

    def close(self) -> None:
        self._agent.close()


BARE: dict[str, type[Way]] = {"shm": BareMemcpy, "tcp": BareSocket, "nixl": BareNixl}


class SinkProcess:
    """The other process: does what it is told over `control`."""

    def __init__(self, control: Connection, transport: str, num_blocks: int) -> None:
        self._control = control
        self._node = BenchNode("sink", transport, num_blocks)
        self._kept: list[object] = []
        self._polling = threading.Event()

    def run(self) -> None:
        while True:
            verb, argument = self._control.recv()
            if verb == "end":
                return
            self._control.send(getattr(self, verb)(argument))

    def admit(self, source: NodeInfo) -> NodeInfo:
        self._node.transports.admit(self._node.info, source)
        return self._node.info

    def open(self, grant: KVGrant) -> bool:
        self._node.transports.open_grant(grant)
        return True

    def clear(self, _: object) -> bool:
        self._node.pool.zero_()
        return True

    def first_words(self, _: object) -> list[int]:
        return self._node.pool.view(torch.int16).flatten(1)[:, 0].tolist()

    def share(self, _: object) -> str:
        fd = os.memfd_create("bare")
        os.ftruncate(fd, self._node.pool.nbytes)
        memory = mmap.mmap(fd, self._node.pool.nbytes)
        np.frombuffer(memory, np.uint8)[::4096] = 0
        self._kept.append(memory)
        return f"/proc/{os.getpid()}/fd/{fd}"

    def socket(self, _: object) -> int:
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._receive, args=(listener,), daemon=True).start()
        return listener.getsockname()[1]

    def _receive(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        memory, order = byte_view(self._node.pool), bytearray(4 * self._node.pool.shape[0])
        while _fill(sock, memoryview(order)):
            for place in np.frombuffer(order, "<u4").tolist():
                _fill(sock, memory[place * MIB : (place + 1) * MIB])
            sock.sendall(b".")

    def nixl(self, _: object) -> tuple[bytes, int]:
        agent = NixlAgent()
        agent.register(self._node.pool)
        threading.Thread(target=self._progress, args=(agent,), daemon=True).start()
        return agent.metadata(), self._node.pool.data_ptr()

    def _progress(self, agent: NixlAgent) -> None:
        while True:
            self._polling.wait()
            agent.progress()
            time.sleep(50e-6)

    def poll(self, on: bool) -> bool:
        """Drives NIXL while the bare writes run: ours drive their own."""
        if on:
            self._polling.set()
        else:
            self._polling.clear()
        return True


def _fill(sock: socket.socket, view: memoryview) -> bool:
    while view:
        received = sock.recv_into(view)
        if not received:
            return False
        view = view[received:]
    return True


def sink_main(control: Connection, transport: str, num_blocks: int) -> None:
    SinkProcess(control, transport, num_blocks).run()


def measure(transport: str, num_blocks: int, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round: (ours, bare)."""
    control, theirs = multiprocessing.get_context("spawn").Pipe()
    arguments = (theirs, transport, num_blocks)
    process = multiprocessing.get_context("spawn").Process(target=sink_main, args=arguments, daemon=True)
    process.start()
    node = BenchNode("source", transport, num_blocks)
    ours, bare = Ours(node, control), BARE[transport](node, control)
    order = list(range(num_blocks))
    random.Random(1).shuffle(order)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):  # the first warms up
        for way, kept in ((ours, seconds[0]), (bare, seconds[1]))[:: 1 if turn % 2 else -1]:
            if way is ours:
                ours.prepare(order)
            elif transport == "nixl":
                _tell(control, "poll", True)
            started = time.perf_counter()
            way.move(order)
            if turn:
                kept.append(time.perf_counter() - started)
            if way is bare and transport == "nixl":
                _tell(control, "poll", False)
    _check(node, control, ours, order)
    ours.close()
    bare.close()
    control.send(("end", None))
    process.join(10)
    node.transports.close()
    return seconds


def _check(node: BenchNode, control: Connection, ours: Ours, order: Sequence[int]) -> None:
    """Every block has arrived where it belongs."""
    _tell(control, "clear", None)
    node.pool.view(torch.int16).flatten(1).copy_(torch.arange(len(order), dtype=torch.int16)[:, None])
    ours.prepare(order)
    ours.move(order)
    arrived = _tell(control, "first_words", None)
    assert [arrived[place] for place in order] == list(range(len(order))), "blocks went astray"


def _tell(control: Connection, verb: str, argument: object) -> object:
    control.send((verb, argument))
    return control.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", default="shm,nixl,tcp")
    parser.add_argument("--mib", type=int, default=1024, help="1 MiB blocks of one move; both pools have that size")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{options.mib} blocks of 1 MiB, {options.rounds} rounds, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'transport':>10} {'ours GB/s':>10} {'bare GB/s':>10} {'ratio':>7}")
    for transport in options.transports.split(","):
        problem = nixl_problem() if transport == "nixl" else ""
        if problem:
            print(f"{transport:>10} left out: {problem}")
            continue
        ours, bare = measure(transport, options.mib, options.rounds)
        rates = [options.mib * MIB / statistics.median(each) / 1e9 for each in (ours, bare)]
        ratio = statistics.median(there / here for here, there in zip(ours, bare, strict=True))
        print(f"{transport:>10} {rates[0]:10.2f} {rates[1]:10.2f} {ratio:7.2f}", flush=True)


if __name__ == "__main__":
    main()
