"""Questions between the router processes of one group, over sockets in the folder that they share.

A question is one line of JSON, the answer JSON until the connection closes. Nobody waits long for anybody: a process
that is silent is left out of what is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from tandem.engine.process.process_log import RateLimited
from tandem.router.placing.siblings import Seat

repeated = RateLimited(logging.getLogger(__name__))

ANSWER_S = 2.0  # a guess: an idle process answers within a millisecond, but may have to ask nodes first
MAX_QUESTION = 1 << 12  # bytes
Answer = Callable[[dict[str, str]], Awaitable[Any]]


class WorkerExchange:
    """One process's end. `answer` says what it has to say to a question, itself included; `seat` None: it is alone."""

    def __init__(self, seat: Seat | None, answer: Answer) -> None:
        self._seat, self._answer = seat, answer
        self._server: asyncio.AbstractServer | None = None
        self._folder = -1

    async def open(self) -> None:
        """Listens for the others' questions."""
        if self._seat is not None and self._seat.num_seats > 1:
            self._folder = os.open(Path(self._seat.path).parent, os.O_RDONLY | os.O_DIRECTORY)
            path = self._path(self._seat.index)
            path.unlink(missing_ok=True)  # of the process that had this seat before
            self._server = await asyncio.start_unix_server(self._serve, str(path), limit=MAX_QUESTION)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            os.close(self._folder)

    async def ask(self, question: dict[str, str]) -> list[Any]:
        """What each process says that answers, this one first."""
        own = await self._answer(question)
        if self._server is None or self._seat is None:
            return [own]
        others = [index for index in range(self._seat.num_seats) if index != self._seat.index]
        answers = await asyncio.gather(*(self._ask_one(index, question) for index in others))
        return [own, *(answer for answer in answers if answer is not None)]

    async def _ask_one(self, index: int, question: dict[str, str]) -> Any:
        try:
            return msgspec.json.decode(await asyncio.wait_for(self._read_answer(index, question), ANSWER_S))
        except (OSError, asyncio.TimeoutError, msgspec.DecodeError, asyncio.IncompleteReadError) as error:
            repeated.warning("router process %d does not say what it does: %r", index, error, key=str(index))
            return None

    async def _read_answer(self, index: int, question: dict[str, str]) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self._path(index)))
        try:
            writer.write(msgspec.json.encode(question) + b"\n")
            return await reader.read(-1)
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.TimeoutError, msgspec.DecodeError):
            line = await asyncio.wait_for(reader.readline(), ANSWER_S)
            question = msgspec.json.decode(line, type=dict[str, str])
            writer.write(msgspec.json.encode(await self._answer(question)))
            await asyncio.wait_for(writer.drain(), ANSWER_S)
        writer.close()

    def _path(self, index: int) -> Path:
        """Returns a path by a descriptor of its folder: a socket's address has 107 bytes, some TMPDIRs have more."""
        return Path(f"/proc/self/fd/{self._folder}/asked-{index}")
