"""The load generator against a small HTTP server with known behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from waiting import PATIENCE_S, soon

from tandem.deploy.bench.request_times import RequestTimes, distribution, summarize
from tandem.deploy.bench.workload import make_bodies
from tandem.deploy.cli import filled, main, make_parser
from tandem.deploy.options import BENCH_OPTIONS

MODELS = b'{"data": [{"id": "stand-in"}]}'
NUM_TOKENS, GAP_S = 4, 0.02


class StandIn:
    """Answers /v1/models, and completions with NUM_TOKENS events GAP_S apart, chunked at odd places."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self.answer: Callable[[asyncio.StreamWriter], Any] = self.stream
        self.answers_from = 0  # nobody is answered before so many have asked at once

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.paths.append(head.split()[1])
            if head.startswith("GET /v1/models"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(MODELS) + MODELS)
            else:
                length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
                self.bodies.append(json.loads(await reader.readexactly(length)))
                self.in_flight += 1
                self.most_in_flight = max(self.most_in_flight, self.in_flight)
                await self.answer(writer)
                self.in_flight -= 1
            await writer.drain()
        writer.close()

    async def stream(self, writer: asyncio.StreamWriter) -> None:
        await soon(lambda: self.most_in_flight >= self.answers_from, "requests at once")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index in range(NUM_TOKENS):
            await asyncio.sleep(GAP_S)
            self._send(writer, b'data: {"choices": [{"text": "%d"}]}\n\n' % index, cut=20)
        self._send(writer, b'data: {"choices": [], "usage": {"completion_tokens": %d}}\n\n' % NUM_TOKENS)
        self._send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    async def refuse(self, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": {"message": "too busy"}}'
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    async def break_off(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._send(writer, b'data: {"choices": [{"text": "a"}]}\n\n')

    async def fail_in_the_stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        self._send(writer, b'data: {"error": {"message": "node lost"}}\n\n')
        writer.write(b"0\r\n\r\n")

    def _send(self, writer: asyncio.StreamWriter, event: bytes, cut: int = 0) -> None:
        for part in (event[:cut], event[cut:]):
            if part:
                writer.write(b"%x\r\n%s\r\n" % (len(part), part))


@pytest.fixture
def stand_in() -> Iterator[tuple[StandIn, str]]:
    server, loop, started = StandIn(), asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []

    async def start() -> None:
        listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        addresses.append(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        started.set()

    def run() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(PATIENCE_S)
    yield server, addresses[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def bench(capsys: Any, url: str, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "--url", url, "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_closed_loop_measures_what_the_server_does(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    server, url = stand_in
    server.answers_from = 3
    code, report = bench(capsys, url, "--num-requests", "9", "--concurrency", "3", "--input-tokens", "5")
    assert code == 0
    assert (report["num_requests"], report["num_failed"], report["model"]) == (9, 0, "stand-in")
    assert report["num_output_tokens"] == 9 * NUM_TOKENS
    assert report["itl_s"]["p50"] > 0
    assert report["ttft_s"]["p50"] >= GAP_S * 0.9
    assert report["e2e_s"]["p50"] >= NUM_TOKENS * GAP_S * 0.9
    assert report["e2e_s"]["mean"] >= report["ttft_s"]["mean"] + (NUM_TOKENS - 1) * report["itl_s"]["mean"] - 1e-6
    assert server.most_in_flight == 3
    assert all(len(body["prompt"]) == 5 and body["ignore_eos"] and body["stream"] for body in server.bodies)


def test_people_get_a_table_and_a_file_the_rest(stand_in: tuple[StandIn, str], tmp_path: Path, capsys: Any) -> None:
    file, picture = tmp_path / "report.json", tmp_path / "report.svg"
    files = ["--output", str(file), "--picture", str(picture)]
    assert main(["bench", "--url", f"{stand_in[1]}/v1", "--num-requests", "2", *files]) == 0
    words = [text.text or "" for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "Output tokens a second, over time" in words
    assert sum(word.startswith(("p50 ", "p90 ", "p99 ")) for word in words) == 2 * 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["milliseconds", "mean", "p50", "p90", "p99", "max"]
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "first token", "each token after it", "gap between events", "whole request"
    ]  # fmt: skip
    report = json.loads(file.read_text())
    assert f"{1e3 * report['ttft_s']['p50']:,.1f}" in lines[1].split()
    assert "num requests" in lines[6]
    assert main(["bench", "--url", stand_in[1], "--num-requests", "1", "--output", "/no/where"]) == 2
    captured = capsys.readouterr()
    assert "can't write --output /no/where" in captured.err
    assert json.loads(captured.out)["num_requests"] == 1, "what was measured is not thrown away"


def test_the_names_of_other_load_generators(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    server, url = stand_in
    server.answers_from = 2
    vllm = ["bench", "--base-url", url, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--json"]
    vllm += ["--num-prompts", "3", "--request-rate", "inf", "--max-concurrency", "2", "--random-input-len", "6"]
    vllm += ["--random-output-len", "7", "--dataset-name", "random", "--ignore-eos", "--save-result", "--seed", "1"]
    assert main(vllm) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["num_requests"] == 3
    assert "--save-result changes nothing here: --output FILE saves the report" in captured.err
    assert set(server.paths) == {"/v1/models", "/v1/chat/completions"}
    assert server.most_in_flight == 2
    for body in server.bodies:
        (message,) = body["messages"]
        assert (message["role"], len(message["content"].split()), body["max_tokens"]) == ("user", 6, 7)


def test_an_open_loop_has_a_bound_where_one_is_given(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    server, url = stand_in
    code, report = bench(capsys, url, "--num-requests", "8", "--rate", "1000", "--max-concurrency", "3")
    assert (code, report["num_requests"]) == (0, 8)
    assert server.most_in_flight <= 3


def test_conversations_of_people(stand_in: tuple[StandIn, str], tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "sharegpt.json"
    turns = [("human", "Why?"), ("gpt", "b" * 40), ("human", "And?")]
    asked = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    file.write_text(json.dumps([asked, {"conversations": []}, {"id": 3}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(file), "--num-prompts", "2"]
    assert bench(capsys, stand_in[1], *flags)[0] == 0
    assert [(body["prompt"], body["max_tokens"]) for body in stand_in[0].bodies] == [("Why?", 10)] * 2
    assert bench(capsys, stand_in[1], *flags, "--output-tokens", "3")[0] == 0
    assert stand_in[0].bodies[-1]["max_tokens"] == 3
    for content, complaint in (("{}", "no conversation"), ("[3]", "ShareGPT's format"), ("[", "ShareGPT's format")):
        file.write_text(content)
        assert main(["bench", "--url", stand_in[1], *flags]) == 2
        assert complaint in capsys.readouterr().err
    assert main(["bench", "--url", stand_in[1], "--dataset", "sharegpt", "--dataset-path", "/no"]) == 2
    assert "can't read --dataset-path" in capsys.readouterr().err


def test_a_bound_on_time_ends_it(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    server, url = stand_in
    answer = server.answer

    async def hang(writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) > 3:
            await asyncio.sleep(PATIENCE_S)
        await answer(writer)

    server.answer = hang
    for loop in ("--concurrency", "--rate"):
        code, report = bench(capsys, url, "--num-requests", "50", loop, "1", "--max-seconds", "0.5")
        assert code == 0
        assert report["num_requests"] <= 3
        assert "interrupted" not in report


def test_ctrl_c_reports_what_was_measured(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    server, url = stand_in
    answer = server.answer

    async def interrupt(writer: asyncio.StreamWriter) -> None:
        if len(server.bodies) > 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(PATIENCE_S)  # its end is that of the connection
        await answer(writer)

    server.answer = interrupt
    code, report = bench(capsys, url, "--num-requests", "50", "--concurrency", "1")
    assert (code, report["num_requests"], report["num_failed"], report["interrupted"]) == (130, 3, 0, True)


def test_open_loop_does_not_wait_for_answers(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    server, url = stand_in
    server.answers_from = 20
    code, _ = bench(capsys, url, "--num-requests", "20", "--rate", "400")
    assert code == 0
    assert server.most_in_flight == 20


@pytest.mark.parametrize(
    ("behaviour", "complaint"),
    [("refuse", "429"), ("break_off", "connection closed"), ("fail_in_the_stream", "node lost")],
)
def test_failed_requests_are_counted_and_named(
    stand_in: tuple[StandIn, str], capsys: Any, behaviour: str, complaint: str
) -> None:
    server, url = stand_in
    server.answer = getattr(server, behaviour)
    code, report = bench(capsys, url, "--num-requests", "2")
    assert code == 1
    assert report["num_failed"] == 2
    assert complaint in report["errors"][0]
    assert report["ttft_s"] == {}


def test_a_request_that_takes_too_long_fails(stand_in: tuple[StandIn, str], capsys: Any) -> None:
    code, report = bench(capsys, stand_in[1], "--num-requests", "1", "--timeout", "0.03")
    assert (code, report["errors"]) == (1, ["no end within 0.03 s"])


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "gopher://x"])
def test_a_server_that_is_not_there_is_a_bad_flag(url: str, capsys: Any) -> None:
    assert main(["bench", "--url", url]) == 2
    assert "check --url" in capsys.readouterr().err


def test_prompts_repeat_with_the_seed_and_share_their_prefix() -> None:
    flags = ["bench", "--num-requests", "3", "--input-tokens", "8", "--shared-prefix", "6", "--vocab-size", "50"]
    bodies = make_bodies(filled(BENCH_OPTIONS, make_parser().parse_args(flags)), "m")
    assert bodies == make_bodies(filled(BENCH_OPTIONS, make_parser().parse_args(flags)), "m")
    prompts = [body["prompt"] for body in bodies]
    assert prompts[0][:6] == prompts[1][:6] == prompts[2][:6]
    assert prompts[0] != prompts[1]
    assert all(len(prompt) == 8 and max(prompt) < 50 for prompt in prompts)


def test_figures_by_hand() -> None:
    assert distribution([]) == {}
    assert distribution([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    good = RequestTimes(sent_at=0.0, event_times=[1.0, 1.5, 3.0], ended_at=3.5, num_tokens=5)
    report = summarize([good, RequestTimes(sent_at=0.0, error="boom")], duration_s=4.0)
    assert report["tpot_s"]["mean"] == 0.5
    assert report["itl_s"]["max"] == 1.5
    assert report["output_tokens_per_s"] == 1.25
    assert (report["num_failed"], report["errors"]) == (1, ["boom"])
