"""Ranks whose device has no memory left in the middle of chosen steps, each once.

A fault: {"rank", "num_tokens" of the step, "at": the layer whose attention fails, "gather", "sample" or, of
transformers' models, "sum"; before a prompt's graphs ("graph") or behind them ("last"), which ranks on CPUs record
then}.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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
    from tandem.engine.running.graphs.decode_graphs import DecodeGraphs
    from tandem.engine.running.graphs.prompt_graphs import PromptGraphs

    places = {(fault["rank"], fault["num_tokens"]): fault["at"] for fault in faults}
    place: list[object] = [None]  # of the step that runs

    def begin(model: Any, tokens: Any, *_: object) -> None:
        if model.group is not None:
            place[0] = places.pop((model.group.shard.rank, len(tokens)), None)

    def attend(layer: SelfAttention, *_: object) -> None:
        _fail_if(place, int(layer.layer_name.split(".")[2]))

    _before(DecoderModel, "forward", begin)
    _before(DecodeGraphs, "run", lambda graphs, rows: begin(graphs.batch._model, rows))
    if {"graph", "last"} & set(places.values()):
        if not torch.cuda.is_available():
            record_prompts()
        _before(PromptGraphs, "forward", lambda *_: _fail_if(place, "graph"))
        _before(PromptGraphs, "forward", lambda graphs, inputs, *_: begin(graphs._model, inputs.positions_T))
        _before(DecoderModel, "from_last_attention", lambda *_: _fail_if(place, "last"))
    for name in ("forward", "forward_wanted"):
        _before(SelfAttention, name, attend)
    if "sum" in places.values():
        from tandem.engine.models.hf.model import HFModel  # transformers, whose import takes others a second

        _before(HFModel, "forward", begin)
        _before(TensorParallel, "sum", lambda *_: _fail_if(place, "sum"))
    _before(TensorParallel, "gather_logits", lambda *_: _fail_if(place, "gather"))
    _before(drawing, "sample", lambda *_: _fail_if(place, "sample"))


def record_prompts() -> None:
    """Has each rank of this process's node record its prompts as graphs."""
    from recorded_graphs import Recorder

    from tandem.engine.parallel import group
    from tandem.engine.running.graphs.prompt_graphs import PromptGraphs
    from tandem.engine.running.runner import ModelRunner

    recorder, make, all_reduce = Recorder(), ModelRunner.__init__, dist.all_reduce

    def make_and_record(runner: ModelRunner, *args: Any, **kwargs: Any) -> None:
        make(runner, *args, **kwargs)
        parts: Any = (), runner._table_of, runner.model.group
        graphs = PromptGraphs(runner.model, runner._inputs, 80, runner.device, recorder.graph, *parts)
        with recorder:
            graphs.capture()
        runner._eager.replay(graphs)

    group.dist.all_reduce = lambda *args, **kwargs: recorder.call(partial(all_reduce, **kwargs), *args)
    ModelRunner.__init__ = make_and_record  # type: ignore[method-assign, assignment]


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
