"""The engine alone, without HTTP: the yardstick's workloads, each beside its physical floor measured in the same run.

    python benchmarks/engine.py MODEL_FOLDER [--only NAME] [--load-format dummy] [--eager] [--json FILE]
                                [--tensor-parallel-size N] [--prompt-graph-tokens N] [--no-prompt-graph-attention]

Floors (engine_workloads.py) stand after what they belong to: output tokens/s (input tokens/s where there is one output
token), time to first token, time per token. `idle` is the time the GPU waited between decode steps (events, median).
Ends with an error if a kernel was compiled once the engine was ready.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from engine_workloads import WORKLOADS, Floors, Limits, Workload

from tandem.deploy.bench.request_times import percentile
from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, LoraOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.contracts.hashing import root_hash
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.clock import StepClock
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.request import FailedEvent, Prompt, Request, TokensEvent
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.structured.grammars import Grammars
from tandem.engine.structured.guides import Guides
from tandem.kernels.check.compilations import CompilationCounter
from tandem.kv_connector.transports.node_transports import NodeTransports
from tandem.node.drafting.engine import make_drafting
from tandem.node.pool import allocate_node_pool
from tandem.node.ranks.leader import start_ranks
from tandem.node.setup import LoadedModel, block_window, load, size_pool, with_device_defaults


@dataclass
class Result:
    """The figures of one workload, each beside its floor."""

    name: str
    input_tok_s: float
    output_tok_s: float
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float
    idle_us: float
    best_tok_s: float  # output tokens a second at the floor; of input where one token is put out
    floor_tpot_ms: float
    floor_ttft_ms: float
    num_compiled: int  # kernels, since the engine was ready


class Engine:
    """One engine on one device, driven by `run`."""

    def __init__(
        self,
        model: str,
        load_format: str,
        cuda_graphs: bool,
        max_model_len: int,
        prompt_budget: int = 0,
        num_ranks: int = 1,
        lora: LoraOptions | None = None,
        speculative_config: str = "",
        clock: StepClock | None = None,
        prompt_graph_tokens: int = NodeOptions.prompt_graph_tokens,
        prompt_graph_attention: bool = NodeOptions.prompt_graph_attention,
        hybrid_kv: bool = True,
    ) -> None:
        options = NodeOptions(
            "unified",
            ModelOptions(model, load_format=load_format, max_model_len=max_model_len),  # type: ignore[arg-type]
            cache=CacheOptions(hybrid_kv=hybrid_kv),
            scheduler=SchedulerOptions(
                decode_prompt_budget=prompt_budget, share_prefixes=True, speculative_config=speculative_config
            ),
            cuda_graphs=cuda_graphs,
            prompt_graph_tokens=prompt_graph_tokens,
            prompt_graph_attention=prompt_graph_attention,
            tensor_parallel_size=num_ranks,
            lora=lora or LoraOptions(),
        )
        started = time.monotonic()
        self.ranks = start_ranks(options)
        self.loaded: LoadedModel = load(options, None if self.ranks is None else self.ranks.membership)
        self.options = with_device_defaults(options, self.loaded.device)
        num_blocks = size_pool(self.loaded, self.options)
        pool = allocate_node_pool(self.loaded, num_blocks, NodeTransports([]), self.ranks).own
        block_size = self.options.cache.block_size
        length, guides = self.loaded.max_model_len, Guides(Grammars(self.loaded.folder, self.loaded.config.vocab_size))
        self.runner = ModelRunner(
            self.loaded.model, pool, self.options.scheduler, block_size, length, (), None, self.ranks, guides,
            adapters=self.loaded.adapters, places=self.loaded.layout.group.places,
        )  # fmt: skip
        self.runner.warmup()
        self.on_gpu = self.loaded.device.type == "cuda"
        if cuda_graphs and self.on_gpu:
            self.runner.capture_decode_steps(prompt_graph_tokens, prompt_graph_attention)
        clock = clock or StepClock(lambda: 0.0)
        self.drafting = make_drafting(self.loaded.draft, self.options, num_blocks, self.runner, clock)
        if self.drafting is not None:
            self.drafting.warm_up(cuda_graphs and self.on_gpu, self.on_gpu)
        window = block_window(self.loaded, self.options)
        self.blocks = BlockPool(num_blocks - window.num_null_blocks, enable_caching=True, window=window)
        scheduler = Scheduler(
            SchedulerState(
                self.options.scheduler,
                self.blocks,
                block_size=block_size,
                max_model_len=self.loaded.max_model_len,
                eos_token_ids=(),
                root_for_salt=lambda salt: root_hash(b"benchmark", salt),
                limits_prompt_work=True,
                num_adapter_slots=options.lora.max_loras if options.lora.enable_lora else 0,
                clock=clock,
            )
        )
        self.core = EngineCore(scheduler, self.runner)
        print(f"ready after {time.monotonic() - started:.1f} s, {num_blocks} blocks", flush=True)

    def decode_rate(self, num_requests: int) -> float:
        """Runs the requests that were added to their ends. Returns tokens a second, from when each has its first."""
        begun: set[str] = set()
        counted, began_at = 0, 0.0
        while self.core.has_work():
            for event in self.core.step():
                assert not isinstance(event, FailedEvent), event
                if isinstance(event, TokensEvent):
                    counted += len(event.token_ids) if len(begun) == num_requests else 0
                    begun.add(event.request.key.request_id)
                    if len(begun) == num_requests and not began_at:
                        began_at = time.perf_counter()
        return counted / (time.perf_counter() - began_at)

    def run(self, workload: Workload, seed: int) -> dict[str, list[float]]:
        """Latencies in seconds: `ttft`, `itl` and `tpot`, and `total`."""
        prompts = make_prompts(workload, seed)
        sampling = SamplingParams(max_tokens=workload.num_output_tokens, temperature=0.0, ignore_eos=True)
        arrivals: dict[str, float] = {}
        last: dict[str, float] = {}
        took: dict[str, list[float]] = {"ttft": [], "itl": [], "tpot": [], "total": []}
        begin = time.perf_counter()
        waiting = list(range(workload.num_requests))
        first: dict[str, float] = {}
        while waiting or arrivals:
            while waiting and len(arrivals) < workload.concurrency:
                index = waiting.pop(0)
                name = f"{workload.name}-{seed}-{index}"
                arrivals[name] = time.perf_counter()
                self.core.scheduler.state.add(make_request(name, prompts[index], sampling))
            for event in self.core.step():
                now = time.perf_counter()
                assert not isinstance(event, FailedEvent), event
                if not isinstance(event, TokensEvent):
                    continue
                name = event.request.key.request_id
                if name in last:
                    took["itl"].append(now - last[name])
                else:
                    first[name] = now
                    took["ttft"].append(now - arrivals[name])
                last[name] = now
                if event.finish_reason is not None:
                    if workload.num_output_tokens > 1:
                        took["tpot"].append((now - first[name]) / (workload.num_output_tokens - 1))
                    del arrivals[name]
        took["total"].append(time.perf_counter() - begin)
        return took


def make_prompts(workload: Workload, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shared = rng.integers(10, 4000, (workload.num_groups, workload.num_shared_tokens), dtype=np.int32)
    own = workload.num_prompt_tokens - workload.num_shared_tokens
    return [
        np.concatenate((shared[i % workload.num_groups], rng.integers(10, 4000, own, dtype=np.int32)))
        for i in range(workload.num_requests)
    ]


def make_request(name: str, prompt: np.ndarray, sampling: SamplingParams) -> Request:
    return Request(Prompt(AttemptKey(name, 0), prompt, sampling))


class IdleMeter:
    """How long the GPU waited between two decode steps: from the end of one to where the next one's graph may start."""

    def __init__(self, runner: ModelRunner) -> None:
        self._begin: torch.cuda.Event | None = None
        self._last_end: torch.cuda.Event | None = None
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        graphs = runner._graphs
        assert graphs is not None
        fill, execute = graphs.batch.fill, runner.execute

        def timed_fill(*what):  # type: ignore[no-untyped-def]
            fill(*what)
            self._begin = _record()

        def timed_execute(output, *hooks):  # type: ignore[no-untyped-def]
            self._begin = None
            step = execute(output, *hooks)
            if self._begin is not None and self._last_end is not None:
                self._gaps.append((self._last_end, self._begin))
            self._last_end = _record() if self._begin is not None else None
            return step

        graphs.batch.fill, runner.execute = timed_fill, timed_execute  # type: ignore[method-assign]

    def take_us(self) -> float:
        torch.cuda.synchronize()
        gaps = [1e3 * end.elapsed_time(begin) for end, begin in self._gaps]
        self._gaps.clear()
        return statistics.median(gaps) if gaps else float("nan")


def _record() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", action="append")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--prompt-budget", type=int, default=0, help="prompt tokens in a step beside decodes")
    parser.add_argument("--prompt-graph-tokens", type=int, default=NodeOptions.prompt_graph_tokens)
    as_served = NodeOptions.prompt_graph_attention
    parser.add_argument("--prompt-graph-attention", action=argparse.BooleanOptionalAction, default=as_served)
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="floors are then those of one rank")
    parser.add_argument("--json")
    args = parser.parse_args()
    sizes = args.max_model_len, args.prompt_budget, args.tensor_parallel_size
    counter = CompilationCounter()
    engine = Engine(
        args.model, args.load_format, not args.eager, *sizes, prompt_graph_tokens=args.prompt_graph_tokens,
        prompt_graph_attention=args.prompt_graph_attention,
    )  # fmt: skip
    counter.warn_from_now()
    limits = Limits.measure(engine.loaded.dtype)
    print(f"memory {limits.bytes_per_s / 1e12:.2f} TB/s, product {limits.flops / 1e12:.0f} TFLOP/s", flush=True)
    meter = None if args.eager else IdleMeter(engine.runner)
    engine.run(Workload("warm", 64, 32, 512, 32), seed=99)
    results = []
    names = ("in tok/s", 9), ("out tok/s", 9), ("floor", 7), ("TTFT", 7), ("floor", 6), ("TPOT", 6), ("floor", 6)
    print(f"{'workload':18}", *(f"{name:>{width}}" for name, width in (*names, ("ITL p99", 8), ("idle us", 8))))
    for number, workload in enumerate(w for w in WORKLOADS if not args.only or w.name in args.only):
        result = measure(engine, workload, number, limits, meter, counter)
        results.append(asdict(result))
        print(f"{result.name:18} {result.input_tok_s:9.0f} {result.output_tok_s:9.0f} {result.best_tok_s:7.0f} "
              f"{result.ttft_ms:7.1f} {result.floor_ttft_ms:6.1f} {result.tpot_ms:6.2f} {result.floor_tpot_ms:6.2f} "
              f"{result.itl_p99_ms:8.1f} {result.idle_us:8.1f}", flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    if engine.ranks is not None:
        engine.ranks.close()
    if counter.num_late:
        raise SystemExit(f"{counter.num_late} kernels were compiled after the engine was ready")


def measure(
    engine: Engine,
    workload: Workload,
    seed: int,
    limits: Limits,
    meter: IdleMeter | None,
    counter: CompilationCounter,
) -> Result:
    if meter is not None:
        meter.take_us()
    took = engine.run(workload, seed)
    floors = Floors.of(engine.loaded, workload, limits)
    seconds, requests = took["total"][0], workload.num_requests
    counted = workload.num_output_tokens if workload.num_output_tokens > 1 else workload.num_prompt_tokens
    return Result(
        workload.name,
        requests * workload.num_prompt_tokens / seconds,
        requests * workload.num_output_tokens / seconds,
        1e3 * statistics.median(took["ttft"]),
        1e3 * statistics.mean(took["tpot"]) if took["tpot"] else float("nan"),
        1e3 * percentile(took["itl"], 99),
        meter.take_us() if meter is not None else float("nan"),
        requests * counted / floors.total,
        1e3 * floors.step,
        1e3 * floors.prompt,
        counter.num_late,
    )


if __name__ == "__main__":
    main()
