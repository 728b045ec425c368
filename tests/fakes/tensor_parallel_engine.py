"""An engine over some ranks in a process of its own: reads what to run from stdin, prints what came out, as JSON.

Input: {"model", "sizes": [ranks of each engine, one after another; negative: they hold whole experts], "num_blocks",
"device", "dtype", "requests": [{"name", "prompt", "samples", fields of SamplingParams}], "rounds",
"num_batched_tokens"}. Output, for each size: {"tokens": {name-sample: ids}, "ranks": ..., "num_cached",
"num_preemptions", "num_launched": steps that no graph ran}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from made_requests import made_request
from waiting import PATIENCE_S

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.process.collector import collect_rarely
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.request import FailedEvent, PromptLogprobsEvent, Request, TokensEvent
from tandem.engine.scheduling.scheduler import Scheduler

BLOCK, BATCHED = 16, 96


def options_of(spec: dict[str, Any], size: int) -> NodeOptions:
    num_batched = spec.get("num_batched_tokens", BATCHED)
    return NodeOptions(
        "unified",
        ModelOptions(str(spec["model"]), dtype=spec.get("dtype", "auto")),
        CacheOptions(BLOCK, BLOCK, num_blocks=spec["num_blocks"], hybrid_kv=False),  # its pool has no window blocks
        SchedulerOptions(16, num_batched, max_prefill_chunk=48 if num_batched == BATCHED else 0),
        device=spec.get("device", "cpu"),
        num_threads=1,
        tensor_parallel_size=abs(size),
        enable_expert_parallel=size < 0,
    )


def run_engine(spec: dict[str, Any], size: int) -> dict[str, Any]:
    from tandem.engine.running.runner import ModelRunner
    from tandem.engine.structured.grammars import Grammars
    from tandem.engine.structured.guides import Guides
    from tandem.kv_connector.transports.node_transports import NodeTransports
    from tandem.node.pool import allocate_node_pool
    from tandem.node.ranks.leader import start_ranks
    from tandem.node.setup import load, size_pool

    options = options_of(spec, size)
    ranks = start_ranks(options)
    loaded = load(options, None if ranks is None else ranks.membership)
    num_blocks = size_pool(loaded, options)
    pool = allocate_node_pool(loaded, num_blocks, NodeTransports([]), ranks).own
    guides = Guides(Grammars(loaded.folder, loaded.config.vocab_size, loaded.config.eos_token_ids))
    runner = ModelRunner(
        loaded.model, pool, options.scheduler, BLOCK, loaded.max_model_len, (), None, ranks, guides
    )  # fmt: skip
    runner.warmup()
    if loaded.device.type == "cuda":
        runner.capture_decode_steps(options.prompt_graph_tokens, options.prompt_graph_attention)
    scheduler = Scheduler(
        SchedulerState(
            options.scheduler,
            BlockPool(num_blocks, True),
            block_size=BLOCK,
            max_model_len=loaded.max_model_len,
            eos_token_ids=(),
            root_for_salt=lambda salt: root_hash(b"test", salt),
        )
    )
    launched = runner.counters["steps_launched"]
    result = _drive(EngineCore(scheduler, runner), spec)
    result["num_launched"] = runner.counters["steps_launched"] - launched
    if ranks is not None:
        ranks.close()
        assert loaded.model.group is not None
        loaded.model.group.leave()
    return result


def _drive(core: EngineCore, spec: dict[str, Any]) -> dict[str, Any]:
    """All requests at once, `rounds` times: from the second on, prompts are found in the cache."""
    result: dict[str, Any] = {"tokens": {}, "ranks": {}, "num_cached": 0}
    for turn in range(spec.get("rounds", 1)):
        requests = [_request(f"{turn}-{one['name']}", one) for one in spec["requests"]]
        _run(core, requests, result)
        result["num_cached"] += sum(request.num_cached_tokens for request in requests)
    return {**result, "num_preemptions": core.scheduler.state.num_preemptions}


def _run(core: EngineCore, requests: list[Request], result: dict[str, Any]) -> None:
    for request in requests:
        core.scheduler.state.add(request)
    while core.has_work():
        for event in core.step():
            name = event.request.key.request_id
            assert not isinstance(event, FailedEvent), event
            if isinstance(event, PromptLogprobsEvent):
                result["ranks"][name] = [entry.rank for entry in event.entries]
            elif isinstance(event, TokensEvent):
                result["tokens"].setdefault(f"{name}-{event.sample_index}", []).extend(event.token_ids)
    core.scheduler.state.check_integrity()


def _request(name: str, one: dict[str, Any]) -> Request:
    fields = {key: value for key, value in one.items() if key not in ("name", "prompt", "samples")}
    sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **fields})
    return made_request(name, np.array(one["prompt"], np.int32), sampling, one.get("samples", [0]))


def run_in_child(spec: dict[str, Any], timeout_s: float = 4 * PATIENCE_S) -> list[dict[str, Any]]:
    """For tests: one result for each of `sizes`."""
    text = json.dumps({**spec, "model": str(spec["model"])})
    command = [sys.executable, str(Path(__file__))]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    given = json.load(sys.stdin)
    collect_rarely()
    results = [run_engine(given, size) for size in given["sizes"]]
    slow = set() if "transformers" in sys.modules else {"torch._dynamo", "sympy"} & sys.modules.keys()
    assert not slow, f"the engine imported {slow}, which takes seconds of every start"
    print(json.dumps(results), flush=True)
    os._exit(0)  # to take torch apart takes half a second
