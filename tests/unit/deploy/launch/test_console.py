"""What the launcher shows: progress, lines of several processes, a summary; plain, coloured or as JSON."""

from __future__ import annotations

import io
import json
import re

import pytest

from tandem.deploy.launch.console import LINE_EVERY_S, Console
from tandem.deploy.launch.rates import Rates
from tandem.deploy.launch.said_once import HOLD_S, SaidOnce, without_time
from tandem.deploy.launch.summary import summary


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_line_on_a_terminal_and_now_and_then_one_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, plain = Terminal(), io.StringIO()
    for stream in (terminal, plain):
        console = Console(stream)
        for now, busy in (
            (0, {"b": "loading weights 25%", "a": "loading weights 50%"}),
            (1, {"b": "warming up", "a": "loading weights 99%"}),
            (LINE_EVERY_S, {"b": "capturing graphs"}),
            (12, {}),
        ):
            console.progress(busy, now)
            console.child_line("c", f"other {now}", now)
    assert [line for line in plain.getvalue().splitlines() if "other" not in line] == ["tandem: b: capturing graphs"]
    drawn = [part for part in re.split(r"\r\x1b\[K|\n", terminal.getvalue()) if part.startswith(("a:", "b:"))]
    assert list(dict.fromkeys(drawn)) == [
        "a: loading weights 50%; b: loading weights 25%",
        "a: loading weights 99%; b: warming up",
        "b: capturing graphs",
    ]
    assert terminal.getvalue().endswith("\r\x1b[K[c] other 12\n"), "nothing is left of it"


def test_a_terminal_gets_colours_and_no_color_takes_them_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured, plain = Terminal(), Terminal()
    Console(coloured).say("hello")
    monkeypatch.setenv("NO_COLOR", "1")
    Console(plain).say("hello")
    assert coloured.getvalue() == "\x1b[36mtandem:\x1b[0m hello\n"
    assert plain.getvalue() == "tandem: hello\n"


def test_json_is_json_from_whoever_it_comes() -> None:
    stream = Terminal()
    console = Console(stream, "json")
    console.say("draining")
    console.child_line("node", '{"time": "t", "level": "warning", "message": "slow"}', 0)
    for index in range(8):
        console.child_line(f"other-{index}", '{"time": "t2", "level": "warning", "message": "slow"}', 0)
    console.child_line("other-0", "a library prints", 0)
    console.child_line("other-0", '{"broken', 0)
    console.progress({"node": "loading weights 5%"}, HOLD_S)
    own, child, printed, broken, again = map(json.loads, stream.getvalue().splitlines())
    assert (own["process"], own["message"], own["level"]) == ("tandem", "draining", "info")
    assert child == {"time": "t", "level": "warning", "message": "slow", "process": "node"}
    assert (printed["process"], printed["message"]) == ("other-0", "a library prints")
    assert (broken["process"], broken["message"]) == ("other-0", '{"broken')
    assert again["message"] == ", ".join(f"other-{index}" for index in range(8)) + " said the same: slow"


LINES = {
    "plain": "2026-01-02 03:04:0{},678 WARNING tandem.node: {}",
    "color": "\x1b[2m03:04:0{}\x1b[0m \x1b[33mWARNING\x1b[0m \x1b[2mnode:\x1b[0m {}",
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_what_several_say_alike_is_shown_once(line: str) -> None:
    said = SaidOnce()
    assert said.admit("a", line.format(1, "the pool is small"), 1)
    assert not said.admit("b", line.format(2, "the pool is small"), 2)
    assert not said.admit("c", line.format(2, "the pool is small"), 2)
    assert not said.admit("c", line.format(3, "the pool is small"), 3)
    assert said.admit("c", line.format(3, "the pool is large"), 3)
    assert said.due(1 + HOLD_S - 0.1) == []
    (told,) = said.due(1 + HOLD_S)
    assert told.startswith("b, c (2 times) said the same: ")
    assert "the pool is small" in told
    assert said.due(100) == [], "the other was said by one alone"
    assert said.admit("b", line.format(9, "the pool is small"), 101), "after a while it is news again"


def test_a_traceback_goes_with_its_line() -> None:
    said, head = SaidOnce(), LINES["plain"].format(1, "step failed")
    for name, shown in (("a", True), ("b", False)):
        assert said.admit(name, head, 1) is shown
        assert said.admit(name, "Traceback (most recent call last):", 1) is shown
        assert said.admit(name, "  File x, line 3", 1) is shown
    assert said.admit("b", LINES["plain"].format(2, "other"), 2)
    assert said.admit("b", "Traceback (most recent call last):", 2)
    assert without_time("tandem: bad folder") == "", "what is no record is never held back for being said before"


def test_the_summary_says_what_a_person_asks_first() -> None:
    node = {"device": "cuda:0", "dtype": "bfloat16", "kv_bytes": 3 << 30}
    lines = summary(
        "m",
        "http://h:1",
        {
            "prefill-0": {**node, "num_kv_tokens": 10_000, "max_model_len": 8192},
            "decode-0": {**node, "num_kv_tokens": 5_000, "max_model_len": 4096, "kv_bytes": 5 << 20},
            "router": {"port": 1},
        },
    )
    assert lines[0] == "m answers up to 4,096 tokens of prompt and output"
    assert lines[1:3] == [
        "  prefill-0  cuda:0, bfloat16, KV of 10,000 tokens in 3.0 GiB",
        "  decode-0   cuda:0, bfloat16, KV of 5,000 tokens in 5 MiB",
    ]
    assert "http://h:1/v1" in lines[3]
    assert summary("m", "http://h:1", {"router": {"port": 1}, "node": {"address": "tcp://h:2"}}) == []


def metrics(active: int, output: int, prompt: int, cached: int) -> str:
    return (
        f"# HELP tandem_router_active_prompts x\ntandem_router_active_prompts {active}.0\n"
        f'vllm:generation_tokens_total{{model_name="m"}} {output}.0\nvllm:other_tokens_total 7.0\n'
        f'vllm:prompt_tokens_total{{model_name="m"}} {prompt}.0\ntandem_router_cached_tokens_total {cached}.0\n'
    )


def test_rates_are_said_while_there_is_something_to_say() -> None:
    rates = Rates()
    assert rates.line(metrics(1, 100, 1000, 0), 5) == "", "there is nothing to compare with"
    told = rates.line(metrics(2, 5220, 3000, 500), 15)
    assert told == "2 requests under way; 512.0 output and 200.0 prompt tokens a second, 25% of them cached"
    told = rates.line(metrics(1, 5230, 3000, 500), 25)
    assert told == "1 request under way; 1.0 output and 0.0 prompt tokens a second"
    assert rates.line(metrics(0, 5230, 3000, 500), 35) == "", "nothing happens"
    assert rates.line("", 45) == ""
    assert rates.line(metrics(1, 9, 9, 9), 55) == "", "the router did not answer before"
    assert rates.line(metrics(1, 5, 5, 5), 65).startswith("1 request under way; 0.0 output"), "it began anew"
