"""Ranks whose device has no memory left in the middle of chosen steps, each once.

A fault: {"rank", "num_tokens" of the step, "at": the layer whose attention fails, "gather", "sample" or, of
transformers' models, "sum"}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

Fault = dict[str, Any]


def program(faults: list[Fault]) -> str:
    """Of a rank other than the first, in place of `leader.PROGRAM`."""
    lines = (
        "import sys",
        "sys.path.remove('')",
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})",
        "from failing_ranks import lose_memory",
        f"lose_memory({json.dumps(faults)})",
        "from tandem.node.ranks.main import main",
        "main(*sys.argv[1:])",
    )
    return "; ".join(lines)


def lose_memory_in_node(faults: list[Fault]) -> None:
    """In the node that this process is going to start, on whichever rank."""
    from tandem.node.ranks import leader

    leader.PROGRAM = program(faults)
    lose_memory(faults)


def lose_memory(faults: list[Fault]) -> None:
    """In this process, whichever rank it is."""
    from tandem.engine.models.decoder import DecoderModel
    from tandem.engine.models.layers.self_attention import SelfAttention
    from tandem.engine.parallel.group import TensorParallel
    from tandem.engine.running import drawing
    from tandem.engine.running.decode_graphs import DecodeGraphs

    places = {(fault["rank"], fault["num_tokens"]): fault["at"] for fault in faults}
    place: list[object] = [None]  # of the step that runs

    def begin(model: Any, tokens: Any, *_: object) -> None:
        if model.group is not None:
            place[0] = places.pop((model.group.shard.rank, len(tokens)), None)

    def attend(layer: SelfAttention, *_: object) -> None:
        _fail_if(place, int(layer.layer_name.split(".")[2]))

    _before(DecoderModel, "forward", begin)
    _before(DecodeGraphs, "run", lambda graphs, rows: begin(graphs.batch._model, rows))
    for name in ("forward", "forward_wanted"):
        _before(SelfAttention, name, attend)
    if "sum" in places.values():
        from tandem.engine.models.hf.model import HFModel  # transformers, whose import takes others a second

        _before(HFModel, "forward", begin)
        _before(TensorParallel, "sum", lambda *_: _fail_if(place, "sum"))
    _before(TensorParallel, "gather_logits", lambda *_: _fail_if(place, "gather"))
    _before(drawing, "sample", lambda *_: _fail_if(place, "sample"))


def _fail_if(place: list[object], here: object) -> None:
    if place[0] == here:
        place[0] = None
        raise torch.OutOfMemoryError("tried to allocate more than there is")


def _before(owner: Any, name: str, check: Any) -> None:
    inner = getattr(owner, name)

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args)
        return inner(*args, **kwargs)

    setattr(owner, name, checked)
