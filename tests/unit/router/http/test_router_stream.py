"""The order of a stream's events, whichever way each of them takes to the client."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from router_in_thread import make_tokenizer_folder
from waiting import PATIENCE_S

from tandem.engine.contracts.errors import UnavailableError
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.router.http.asked import Asked
from tandem.router.http.listeners import EventStream
from tandem.router.http.responses import CompletionFormat
from tandem.router.requests.sample_output import Piece
from tandem.router.text.completion import ModelFacts, PromptPlan
from tandem.router.text.openai_api import CompletionBody, parse_body
from tandem.router.text.tokenizer import Tokenizer

LIMIT = 8


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(make_tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@dataclass
class Client:
    """Takes a chunk whenever it is `willing`."""

    willing: bool = True
    written: list[bytes] = field(default_factory=list)
    num_passed: int = 0

    def write_chunk(self, body: bytes) -> bool:
        if self.willing:
            self.written.append(body)
            self.num_passed += 1
        return self.willing


def make_stream(tokenizer: Tokenizer, client: Client, overflows: list[bool], n: int = 1) -> EventStream:
    body = parse_body(CompletionBody, b'{"prompt": "a", "stream": true, "n": %d}' % n)
    plan = PromptPlan(np.array([1], dtype=np.int32), "a", SamplingParams())
    facts = ModelFacts("m", 100, 400)
    asked = Asked("cmpl-1", body, [plan], CompletionFormat("cmpl-1", body, facts))
    return EventStream(asked, tokenizer, client=client, limit=LIMIT, on_overflow=lambda: overflows.append(True))


async def endpoint(stream: EventStream, client: Client) -> None:
    """As the endpoint does; a batch takes a turn of the event loop to be written."""
    batch = await stream.next_batch()
    stream.begin()
    while batch:
        await asyncio.sleep(0)
        client.written.append(batch)
        batch = await stream.next_batch()


def texts(written: list[bytes]) -> list[str]:
    events = [event for event in b"".join(written).split(b"\n\n") if b'"choices":' in event]
    return [msgspec.json.decode(event[6:])["choices"][0]["text"] for event in events]


BEGUN = ["piece", "turn", "turn", "turn", "turn"]
MOVES = ["piece", "piece", "turn", "willing", "unwilling"]


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from([[], BEGUN]), st.lists(st.sampled_from(MOVES), max_size=30), st.booleans())
def test_events_arrive_in_order(tokenizer: Tokenizer, first: list[str], moves: list[str], ends: bool) -> None:
    client, overflows = Client(), []

    async def run() -> list[str]:
        stream, sent = make_stream(tokenizer, client, overflows), []
        task = asyncio.ensure_future(endpoint(stream, client))
        for move in first + moves:
            if move == "piece":
                sent.append(f"token {len(sent)}")
                stream.piece(0, 0, Piece(sent[-1], (5,), None, None))
            elif move == "turn":
                await asyncio.sleep(0)
            else:
                client.willing = move == "willing"
        stream.finished(0) if ends else stream.failed(0, UnavailableError("gone"))
        if sent or ends:
            await asyncio.wait_for(task, PATIENCE_S)
        else:
            with pytest.raises(UnavailableError):
                await task
        return sent

    sent = asyncio.run(run())
    arrived = texts(client.written)
    if overflows:
        assert overflows == [True]
        assert arrived == sent[: len(arrived)]
    else:
        assert arrived == sent
        end = b"data: [DONE]\n\n" if ends else b'"code":"unavailable"}}\n\n'
        assert not (sent or ends) or b"".join(client.written).endswith(end)


@pytest.mark.parametrize(("n", "num_writes"), [(1, 6), (3, 2)])
def test_a_turn_of_the_event_loop_is_one_write(tokenizer: Tokenizer, n: int, num_writes: int) -> None:
    """A single choice's event is the write; those of several choices are gathered."""
    client = Client()

    async def run() -> None:
        stream = make_stream(tokenizer, client, [], n)
        task = asyncio.ensure_future(endpoint(stream, client))
        stream.piece(0, 0, Piece("first", (5,), None, None))
        for _ in range(4):
            await asyncio.sleep(0)
        client.written.clear()
        for step in range(6 // n):
            for sample in range(n):
                stream.piece(0, sample, Piece(f"{step}", (5,), None, None))
            for _ in range(4):
                await asyncio.sleep(0)
        assert len(client.written) == num_writes
        assert client.num_passed == (6 if n == 1 else 0)
        task.cancel()

    asyncio.run(run())
