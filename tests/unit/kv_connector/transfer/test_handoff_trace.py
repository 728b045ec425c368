"""What a node writes down of its pushes: when each layer was computed, and when the layers that went together left."""

from __future__ import annotations

import json
from pathlib import Path

from tandem.engine.contracts.keys import AttemptKey
from tandem.kv_connector.transfer import trace as handoff_trace
from tandem.kv_connector.transfer.trace import HandoffTrace, Moment

KEY = AttemptKey("r", 0)


def test_layers_that_go_together_were_computed_one_by_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(handoff_trace, "_FLUSH_S", -1.0)
    trace = HandoffTrace(str(tmp_path), "p")
    written = [Moment(t) for t in (1.0, 2.0, 3.0)]
    trace.pushed(KEY, range(3), 5, written, begun=Moment(1.5), done=Moment(3.5), nbytes=300)
    trace.pushed(KEY, range(3, 4), 5, [Moment(4.0)], begun=Moment(4.25), done=Moment(4.5), nbytes=100)
    trace.pushed(KEY, range(-1, 0), 0, (), begun=Moment(0.5), done=Moment(0.75), nbytes=50)
    trace.end_of_pushes(KEY, on_cuda=False)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    computed = [(line["layer"], line["t"]) for line in lines if line["stage"] == "computed"]
    assert computed == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    pushed = [
        (line["layer"], line["last_layer"], line["begin"], line["t"]) for line in lines if line["stage"] == "pushed"
    ]
    assert pushed == [(0, 2, 3.0, 3.5), (3, 3, 4.25, 4.5), (-1, -1, 0.5, 0.75)]
