"""`tandem plan`: the search by made-up judges, loads out of traces and request logs, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.deploy.bench.plan import Division, Verdict, fewest_alone, fewest_split
from tandem.deploy.bench.recorded_load import read_load
from tandem.deploy.cli import main
from tandem.engine.contracts.errors import ConfigError


@pytest.mark.parametrize("needed", range(1, 17))
def test_the_fewest_nodes_are_found_and_few_are_tried(needed: int) -> None:
    tried: list[int] = []

    def judge(division: Division) -> Verdict:
        tried.append(division.num_nodes)
        return Verdict(float(division.num_nodes >= needed), 0.0)

    assert fewest_alone(judge, 0.9, 16) == Division(needed)
    assert len(tried) <= 9
    assert max(tried) <= 16


def test_too_few_gpus_give_the_most_there_are() -> None:
    assert fewest_alone(lambda division: Verdict(0.5, 0.0), 0.9, 6) == Division(6)
    assert fewest_split(lambda division: Verdict(0.5, 0.0), 0.9, 6).total == 6


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), (1, 5), (4, 1), (3, 3), (7, 2)])
def test_the_role_that_lacks_is_added(prefill: int, decode: int) -> None:
    def judge(division: Division) -> Verdict:
        shares = min(1.0, division.num_prefill / prefill), min(1.0, division.num_decode / decode)
        return Verdict(min(shares), sum(shares))

    assert fewest_split(judge, 1.0, 16) == Division(0, prefill, decode)


def test_where_no_request_is_good_the_role_is_added_that_relieves_more() -> None:
    def judge(division: Division) -> Verdict:
        lacking = max(0, 4 - division.num_decode) + max(0, 2 - division.num_prefill)
        return Verdict(float(not lacking), -lacking)

    assert fewest_split(judge, 1.0, 8) == Division(0, 2, 4)


def test_what_is_not_needed_is_taken_away() -> None:
    def judge(division: Division) -> Verdict:
        return Verdict(float(division.num_decode >= 3), min(division.num_prefill, division.num_decode))

    assert fewest_split(judge, 1.0, 16) == Division(0, 1, 3)


def line(at_s: int, **said: object) -> str:
    return json.dumps({"time": f"2026-11-22T10:00:{at_s:02}.500Z", "logger": "tandem.requests", **said})


def test_a_request_log_is_a_load(tmp_path: Path) -> None:
    log = tmp_path / "router.log"
    log.write_text("\n".join([
        line(9, prompt_tokens=1500, cached_tokens=1024, output_tokens=7, duration_s=2.0),
        json.dumps({"time": "x", "message": "a node was lost"}),
        line(8, status=429),
        line(8, prompt_tokens=2000, cached_tokens=512, output_tokens=20, prompts=2, duration_s=3.5),
    ]))  # fmt: skip
    first, second, third = read_load(str(log))
    assert first.arrival_s == 0, "a simulation goes through all that lies before"
    assert (third.arrival_s - first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (2.5, 1000, 10)
    assert (third.num_prompt_tokens, third.num_output_tokens) == (1500, 7)
    assert third.block_ids[:2] == (0, 1), "what was cached is the beginning of the one prompt that all share"
    assert set(first.block_ids) & set(second.block_ids) == set()
    log.write_text("nothing\n")
    with pytest.raises(ConfigError, match="--enable-log-requests"):
        read_load(str(log))
    log.write_text(line(1, prompt_tokens="many"))
    with pytest.raises(ConfigError, match="line 1"):
        read_load(str(log))
    with pytest.raises(ConfigError, match="can't read"):
        read_load(str(tmp_path / "nowhere"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        {"timestamp": 400 * i, "input_length": 4096, "output_length": 40, "hash_ids": [100 * i + j for j in range(8)]}
        for i in range(40)
    ]
    path = tmp_path / "trace"
    path.write_text("\n".join(map(json.dumps, lines)))
    flags = ["plan", "--trace", str(path), "--ttft-target-ms", "500", "--tpot-target-ms", "50"]
    assert main([*flags, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["best"]["enough"]
    assert plan["best"]["gpus"] == plan["best"]["single"] + plan["best"]["prefill"] + plan["best"]["decode"]
    fewer = [tried for tried in plan["tried"] if tried["gpus"] < plan["best"]["gpus"]]
    assert not any(tried["enough"] for tried in fewer)
    assert main([*flags, "--speed", "4"]) == 0
    table = capsys.readouterr().out
    assert "fewest: " in table
    assert main([*flags, "--speed", "400", "--gpus-max", "2"]) == 1
    assert "no division of 2 GPUs" in capsys.readouterr().out
    assert main([*flags, "--gpus-max", "2", "--gpus-per-node", "4"]) == 1
    assert main(["plan"]) == 2
