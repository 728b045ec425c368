"""Messages from rank 0 to the other ranks, and their answers about adapters: MessagePack over a socket pair each, with
a length before each. No torch."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import numpy as np

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.decoder import WireDecoder
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.scheduling.speculation.head_tokens import HeadRow, HeadVerb
from tandem.engine.scheduling.step import BlockAppend, SchedulerOutput, StepMeta

LENGTH_BYTES = 4
Verb = Literal["step", "dummy", "warm_up", "capture", "read", "let_go", "head"]


class RankSetup(msgspec.Struct, frozen=True):
    """First message to a rank. `options` are the node's, `port` is where the ranks find each other, `lost_fd` the pipe
    into which the rank writes the number of each step that it had no memory for."""

    options: NodeOptions
    rank: int
    port: int
    lost_fd: int


class PoolFile(msgspec.Struct, frozen=True):
    """Second message, where ranks share a pool: rank 0's file descriptor of its memory, and where the pool begins."""

    fd: int
    offset: int


class HeadCommand(msgspec.Struct, frozen=True, array_like=True):
    """What the head that guesses is to do, with the arguments of HeadSteps.guess."""

    verb: HeadVerb
    rows: tuple[HeadRow, ...] = ()
    appends: tuple[BlockAppend, ...] = ()


class Command(msgspec.Struct, frozen=True, array_like=True):
    """An order to all ranks. `step` is the plan of a step; for a dummy step only its rows count. `adapter` is to be
    read, beside steps, and answered by AdapterRead, or to be let go of. `head`: of a head that guesses."""

    verb: Verb
    step: SchedulerOutput | None = None
    adapter: AdapterRef | None = None
    head: HeadCommand | None = None


class AdapterRead(msgspec.Struct, frozen=True, array_like=True):
    """A rank's answer: it holds the adapter of this digest in memory, or has this `problem` with it."""

    digest: bytes
    problem: str = ""


def _to_bytes(value: Any) -> bytes:
    assert isinstance(value, np.ndarray), f"a step holds {type(value).__name__}"
    return np.ascontiguousarray(value, np.int32).tobytes()


def _from_bytes(kind: type, data: Any) -> Any:
    assert kind is np.ndarray
    return np.frombuffer(data, np.int32)


def as_announced(step: SchedulerOutput) -> SchedulerOutput:
    """The step as the other ranks get it. Rank 0 alone moves KV, but how it does decides whether a step runs as a CUDA
    graph, on which all ranks must agree."""
    if step.connector_meta is None:
        return step
    return msgspec.structs.replace(step, connector_meta=StepMeta(by_layer=step.is_layered))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_decode_command: WireDecoder[Command] = WireDecoder(Command, dec_hook=_from_bytes)
_decode_setup: WireDecoder[RankSetup] = WireDecoder(RankSetup)
_decode_answer: WireDecoder[AdapterRead] = WireDecoder(AdapterRead)
_decode_pool_file: WireDecoder[PoolFile] = WireDecoder(PoolFile)


def send(sockets: Iterable[socket.socket], message: RankSetup | PoolFile | Command | AdapterRead) -> None:
    """Sends a message to all `sockets`. Raises OSError when one is gone, or takes nothing for too long."""
    body = _encoder.encode(message)
    data = len(body).to_bytes(LENGTH_BYTES, "little") + body
    for end in sockets:
        try:
            end.sendall(data)
        except BlockingIOError:
            raise TimeoutError("a rank has stopped reading what it is told") from None


def limit_sends(end: socket.socket, within_s: float) -> None:
    """Lets no send on this socket wait longer for its reader; receiving waits as ever."""
    seconds, rest = divmod(within_s, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(rest * 1e6)))


def receive_setup(end: socket.socket) -> RankSetup | None:
    body = _receive(end)
    return None if body is None else _decode_setup(body)


def receive_pool_file(end: socket.socket) -> PoolFile | None:
    body = _receive(end)
    return None if body is None else _decode_pool_file(body)


def receive_command(end: socket.socket) -> Command | None:
    """Waits for the next command. None: rank 0 has closed its end, or is gone."""
    body = _receive(end)
    return None if body is None else _decode_command(body)


def receive_answer(end: socket.socket, within_s: float) -> AdapterRead | None:
    """Waits for a rank's answer. None: it didn't come, or the rank is gone."""
    if not select.select([end], [], [], max(0.0, within_s))[0]:
        return None
    body = _receive(end)
    return None if body is None else _decode_answer(body)


def _receive(end: socket.socket) -> bytearray | None:
    length = _exactly(end, LENGTH_BYTES)
    return None if length is None else _exactly(end, int.from_bytes(length, "little"))


def _exactly(end: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            received = end.recv_into(view)
        except ConnectionResetError:
            return None
        if not received:
            return None
        view = view[received:]
    return data
