"""TCP relays between the processes of a cluster, which can cut, delay and break what named pairs say to each other.

Nodes listen on 127.0.0.1 and advertise RELAY_HOST; for each port that one listens on, the relay listens on the same
port of RELAY_HOST. Who connects is found by its source port in /proc: a relay knows both ends of every connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

RELAY_HOST = "127.0.0.2"
CHUNK = 1 << 16
SCAN_S = 0.1
LISTEN = "0A"  # in /proc/net/tcp
ZMQ_GREETING = 0xFF  # first byte of a ZMTP connection; KV links begin with a length below 2**24
FAULTS = ("stall", "drop", "delay", "reset", "half-close")


@dataclass(frozen=True)
class Rule:
    """What happens between `one` and `other` (names or beginnings of names) on `channel`: control, kv or redis.

    stall       nothing passes, all of it comes later
    drop        nothing passes, what was sent meanwhile is lost, and the connection with it
    delay       each piece comes `delay_s` later
    reset       connections break, and new ones too
    half-close  who accepted hears that the other has ended, and may go on speaking
    """

    fault: str
    one: str
    other: str
    channel: str
    delay_s: float = 0.0

    def concerns(self, connector: str, owner: str, channel: str) -> bool:
        ends = ((self.one, self.other), (self.other, self.one))
        return channel == self.channel and any(connector.startswith(a) and owner.startswith(b) for a, b in ends)


@dataclass(eq=False)
class _Connection:
    connector: str
    owner: str
    channel: str
    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    lossy: bool = False  # bytes were dropped: it must not live on

    def break_it(self) -> None:
        for writer in (self.near, self.far):
            _reset(writer)


class Relay:
    """A thread with an event loop. `processes` names the cluster's processes."""

    def __init__(self, processes: Callable[[], dict[str, psutil.Process]]) -> None:
        self._processes = processes
        self._names: dict[str, psutil.Process] = {}
        self._rules: tuple[Rule, ...] = ()
        self._changed = asyncio.Event()
        self._servers: dict[int, asyncio.Server] = {}
        self._owners: dict[int, str] = {}
        self._channels: dict[int, str] = {}
        self._connections: set[_Connection] = set()
        self.num_struck = 0  # connections that a rule concerned
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._scanner = asyncio.run_coroutine_threadsafe(self._scan(), self._loop)

    def relay_redis(self, port: int) -> int:
        """The relay's own port in front of that of a Redis server."""
        return self._call(self._listen("redis", "redis", "127.0.0.1", 0, port))

    def apply(self, *rules: Rule) -> None:
        """These rules instead of those before; none: everything passes again."""
        self._call(self._apply(rules))

    def close(self) -> None:
        self._scanner.cancel()
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    # --- event loop -------------------------------------------------------------------------------------------

    async def _apply(self, rules: tuple[Rule, ...]) -> None:
        before, self._rules = self._rules, rules
        changed, self._changed = self._changed, asyncio.Event()
        for connection in list(self._connections):
            if connection.lossy and self._rule(connection) is None:
                connection.break_it()
            rule = self._rule(connection)
            if rule is None or rule in before:
                continue
            self.num_struck += 1
            if rule.fault == "reset":
                connection.break_it()
            elif rule.fault == "half-close":
                connection.lossy = True
                with contextlib.suppress(OSError, RuntimeError):
                    connection.far.write_eof()
        changed.set()

    async def _scan(self) -> None:
        """Relays each port that a node begins to listen on."""
        while True:
            self._names = await asyncio.to_thread(self._processes)
            ports = await asyncio.to_thread(_listening, self._names)
            for port, owner in ports.items():
                if self._owners.get(port) != owner or port not in self._servers:
                    self._owners[port] = owner
                    with contextlib.suppress(OSError):
                        if port not in self._servers:
                            await self._listen(owner, "", RELAY_HOST, port, port)
            await asyncio.sleep(SCAN_S)

    async def _listen(self, owner: str, channel: str, host: str, port: int, target: int) -> int:
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await self._serve(reader, writer, target)

        server = await asyncio.start_server(accept, host, port)
        own: int = server.sockets[0].getsockname()[1]
        self._servers[target], self._owners[target] = server, owner
        if channel:
            self._channels[target] = channel
        return own

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
        source = writer.get_extra_info("peername")[1]
        connector = await asyncio.to_thread(_who, source, self._names)
        if not connector:  # of a process that has just started
            connector = await asyncio.to_thread(lambda: _who(source, self._processes()))
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError:
            _reset(writer)
            return
        channel = self._channels.get(target, "")
        connection = _Connection(connector, self._owners[target], channel, writer, far_writer)
        self._connections.add(connection)
        rule = self._rule(connection)
        try:
            if rule is not None and rule.fault in ("reset", "half-close"):
                self.num_struck += 1
                return
            both = (self._copy(reader, far_writer, connection, target), self._copy(far_reader, writer, connection))
            await asyncio.gather(*both)
        finally:
            self._connections.discard(connection)
            connection.break_it()

    async def _copy(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: _Connection,
        unknown: int | None = None,
    ) -> None:
        """One direction, until it ends. `unknown`: the port whose first byte says what it is for."""
        while data := await reader.read(CHUNK):
            if unknown is not None and not connection.channel:
                connection.channel = "control" if data[0] == ZMQ_GREETING else "kv"
                self._channels[unknown] = connection.channel
            if await self._passes(connection):
                writer.write(data)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()

    async def _passes(self, connection: _Connection) -> bool:
        """Waits as long as the rules say; False: these bytes are lost."""
        rule = self._rule(connection)
        while rule is not None and rule.fault == "stall":
            await self._changed.wait()
            rule = self._rule(connection)
        if rule is None:
            return True
        if rule.fault == "delay":
            await asyncio.sleep(rule.delay_s)
        elif rule.fault == "drop":
            connection.lossy = True
            return False
        return True

    def _rule(self, connection: _Connection) -> Rule | None:
        ends = (connection.connector, connection.owner, connection.channel)
        return next((rule for rule in self._rules if rule.concerns(*ends)), None)

    async def _close(self) -> None:
        for server in self._servers.values():
            server.close()
        for connection in list(self._connections):
            connection.break_it()
        await asyncio.sleep(0.1)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Closes with a RST instead of a FIN."""
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def _listening(processes: dict[str, psutil.Process]) -> dict[int, str]:
    """Ports on which nodes listen, with their names."""
    nodes = {name: each for name, each in processes.items() if name.split("-")[0] in ("prefill", "decode", "unified")}
    listening = {inode: port for inode, (port, state) in _sockets().items() if state == LISTEN}
    return {listening[inode]: name for name, each in nodes.items() for inode in _held(each) & listening.keys()}


def _who(source_port: int, processes: dict[str, psutil.Process]) -> str:
    """Name of the process that connects from that port; "" if it is none of these."""
    wanted = {inode for inode, (port, state) in _sockets().items() if port == source_port and state != LISTEN}
    return next((name for name, each in processes.items() if _held(each) & wanted), "")


def _sockets() -> dict[str, tuple[int, str]]:
    """Local port and state of each TCP socket of this host, by its inode: one file, however many processes ask."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9]: (int(row[1].rpartition(":")[2], 16), row[3]) for row in rows}


def _held(process: psutil.Process) -> set[str]:
    """Inodes of the sockets that a process holds."""
    held = set()
    with contextlib.suppress(OSError):
        for each in os.scandir(f"/proc/{process.pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(each.path).removeprefix("socket:[").removesuffix("]"))
    return held
