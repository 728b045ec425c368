"""Scales that are measured are those that the served layers need: nothing overflows, and a node takes the file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from split_pair import GREEDY, Alone, make_pair

from in_process_cluster import Node, node_options
from tandem.deploy.cli import main
from tandem.engine.contracts.errors import ConfigError
from tandem.kernels.blocks.quantization import overflow_counts
from tandem.node.setup import load
from tiny_models import random_prompt, tiny_model


def test_a_calibrated_node_serves_without_overflow(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = tiny_model("llama"), tmp_path / "scales.json"
    assert main(["calibrate", str(folder), "--device", "cpu", "--output", str(file)]) == 0
    scales = json.loads(file.read_text())
    assert len(scales["k"]) == len(scales["v"]) == 3
    assert all(0 < scale < 1 for scale in (*scales["k"], *scales["v"])), "KV far below fp8's range is spread over it"
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert all(0 < float(row[column]) < 0.05 for row in rows for column in (2, 4)), "errors of three bits of mantissa"
    before = sum(overflow_counts().values())
    alone = Alone(Node(node_options("unified", folder, kv_cache_dtype="fp8_e4m3", kv_scales=str(file))))
    group = alone.node.info.layout.group
    assert (list(group.k_scales), list(group.v_scales)) == (scales["k"], scales["v"])
    assert alone.run(random_prompt(150, seed=77), GREEDY)[0]
    alone.node.stop()
    assert sum(overflow_counts().values()) == before


def test_a_pair_measures_equal_scales_at_its_start_and_serves_without_overflow() -> None:
    options = {"kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True}
    before = sum(overflow_counts().values())
    with make_pair("tcp", decode=options, prefill=options) as pair:
        sink, source = (node.info.layout.group for node in (pair.decode, pair.prefill))
        assert sink == source, "nothing is converted between them"
        scales = (*sink.k_scales, *sink.v_scales)
        assert len(scales) == 6
        assert all(0 < scale < 1 and math.frexp(scale)[0] == 0.5 for scale in scales), "powers of two"
        result = pair.run(random_prompt(150, seed=77), GREEDY)
        assert result.failed is None
        assert len(result.output()) == GREEDY.max_tokens
    assert sum(overflow_counts().values()) == before


def test_scales_are_given_or_measured_and_for_fp8_alone(tmp_path: Path) -> None:
    for options in ({}, {"kv_cache_dtype": "fp8_e4m3", "kv_scales": str(tmp_path / "scales.json")}):
        with pytest.raises(ConfigError, match="in place of --kv-scales"):
            load(node_options("unified", tiny_model("llama"), calculate_kv_scales=True, **options))


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n\n")
    for file, problem in ((empty, "holds no prompt"), (tmp_path / "nowhere", "can't read")):
        assert main(["calibrate", str(tiny_model("llama")), "--prompts-file", str(file)]) == 2
        assert problem in capsys.readouterr().err
