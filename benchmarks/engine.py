"""The engine alone, without HTTP: the yardstick's workloads, each beside its physical floor measured in the same run.

    python benchmarks/engine.py MODEL_FOLDER [--only NAME] [--load-format dummy] [--eager] [--json FILE]
                                [--tensor-parallel-size N]

Floors: a decode step reads every weight and the batch's KV once (bytes / copy bandwidth); a prompt costs its FLOPs
(/ the rate of a large matrix product). `idle` is the time the GPU waited between decode steps (events, median).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch

from tandem.engine.block_pool import BlockPool
from tandem.engine.config import ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.core import EngineCore
from tandem.engine.hashing import root_hash
from tandem.engine.kv_pool import allocate_pool
from tandem.engine.node_setup import LoadedModel, load, size_pool, with_device_defaults
from tandem.engine.parallel.ranks import start_ranks
from tandem.engine.request import FailedEvent, Request, TokenEvent
from tandem.engine.runner import ModelRunner
from tandem.engine.sampling_params import SamplingParams
from tandem.engine.scheduler import Scheduler


@dataclass(frozen=True)
class Workload:
    name: str
    num_requests: int
    concurrency: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0  # of the prompt, shared by all requests of a group
    num_groups: int = 1


WORKLOADS = (
    Workload("single_stream", 3, 1, 512, 256),
    Workload("decode_b64", 128, 64, 128, 256),
    Workload("decode_b256", 512, 256, 128, 256),
    Workload("chat_1k_256_c128", 384, 128, 1024, 256),
    Workload("prefill_8k", 32, 8, 8192, 1),
    Workload("ttft_8k_c1", 8, 1, 8192, 8),
    Workload("ttft_2k_c1", 12, 1, 2048, 8),
    Workload("prefix_shared", 192, 64, 4352, 64, 4096, 8),
)


@dataclass
class Result:
    name: str
    input_tok_s: float
    output_tok_s: float
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float
    idle_us: float
    floor_tpot_ms: float  # a decode step of this batch at half its output
    floor_ttft_ms: float  # one prompt alone


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
    ) -> None:
        options = NodeOptions(
            "unified",
            ModelOptions(model, load_format=load_format, max_model_len=max_model_len),  # type: ignore[arg-type]
            scheduler=SchedulerOptions(decode_prompt_budget=prompt_budget, share_prefixes=True),
            cuda_graphs=cuda_graphs,
            tensor_parallel_size=num_ranks,
        )
        started = time.monotonic()
        self.ranks = start_ranks(options)
        self.loaded: LoadedModel = load(options, None if self.ranks is None else self.ranks.membership)
        self.options = with_device_defaults(options, self.loaded.device)
        num_blocks = size_pool(self.loaded, self.options)
        pool = allocate_pool(self.loaded.layout, num_blocks, self.loaded.device)
        block_size = self.options.cache.block_size
        self.runner = ModelRunner(
            self.loaded.model, pool, self.options.scheduler, block_size, self.loaded.max_model_len, (), None, self.ranks
        )
        self.runner.warmup()
        self.on_gpu = self.loaded.device.type == "cuda"
        if cuda_graphs and self.on_gpu:
            self.runner.capture_decode_steps()
        self.blocks = BlockPool(num_blocks, enable_caching=True)
        scheduler = Scheduler(
            self.options.scheduler,
            self.blocks,
            block_size=block_size,
            max_model_len=self.loaded.max_model_len,
            eos_token_ids=(),
            root_for_salt=lambda salt: root_hash(b"benchmark", salt),
            limits_prompt_work=True,
        )
        self.core = EngineCore(scheduler, self.runner)
        print(f"ready after {time.monotonic() - started:.1f} s, {num_blocks} blocks", flush=True)

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
                self.core.scheduler.add(make_request(name, prompts[index], sampling))
            for event in self.core.step():
                now = time.perf_counter()
                assert not isinstance(event, FailedEvent), event
                if not isinstance(event, TokenEvent):
                    continue
                name = event.request.request_id
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
    return Request(request_id=name, attempt=0, prompt_token_ids=prompt, sampling=sampling)


class IdleMeter:
    """How long the GPU waited between two decode steps: from the end of one to where the next one's graph may start."""

    def __init__(self, runner: ModelRunner) -> None:
        self._begin: torch.cuda.Event | None = None
        self._last_end: torch.cuda.Event | None = None
        self._gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        graphs = runner._graphs
        assert graphs is not None
        fill, execute = graphs.batch.fill, runner.execute

        def timed_fill(rows, size):  # type: ignore[no-untyped-def]
            fill(rows, size)
            self._begin = _record()

        def timed_execute(output):  # type: ignore[no-untyped-def]
            self._begin = None
            step = execute(output)
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


@dataclass(frozen=True)
class Limits:
    bytes_per_s: float
    flops: float

    @classmethod
    def measure(cls, dtype: torch.dtype) -> Limits:
        source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
        target = torch.empty_like(source)
        copy = best_of(lambda: target.copy_(source))
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        product = best_of(lambda: a @ b)
        return cls(2 * source.numel() / copy, 2 * 8192**3 / product)


def best_of(call, repeat: int = 10) -> float:  # type: ignore[no-untyped-def]
    """Median seconds of one call."""
    times = []
    for _ in range(repeat + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def floors(engine: Engine, workload: Workload, limits: Limits) -> tuple[float, float]:
    """(seconds of a decode step of the whole batch, seconds of one prompt)."""
    model, layout = engine.loaded.model, engine.loaded.layout
    config = model.config if model.group is None else model.group.shard.config(model.config)
    weights = sum(p.numel() for name, p in engine.loaded.model.named_parameters() if "embed" not in name)
    kv_bytes = layout.payload_bytes // layout.block_size
    length = workload.num_prompt_tokens + workload.num_output_tokens // 2
    step = (weights * engine.loaded.dtype.itemsize + workload.concurrency * length * kv_bytes) / limits.bytes_per_s
    new = workload.num_prompt_tokens
    matrices = weights - model.lm_head.weight.numel()
    attention = 2 * new * new * config.num_heads * config.head_dim * config.num_layers
    return step, (2 * matrices * new + attention) / limits.flops


def percentile(values: Sequence[float], q: float) -> float:
    return float(np.percentile(values, q)) if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", action="append")
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--prompt-budget", type=int, default=0, help="prompt tokens in a step beside decodes")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="floors are then those of one rank")
    parser.add_argument("--json")
    args = parser.parse_args()
    sizes = args.max_model_len, args.prompt_budget, args.tensor_parallel_size
    engine = Engine(args.model, args.load_format, not args.eager, *sizes)
    limits = Limits.measure(engine.loaded.dtype)
    print(f"copy {limits.bytes_per_s / 1e12:.2f} TB/s, product {limits.flops / 1e12:.0f} TFLOP/s", flush=True)
    meter = None if args.eager else IdleMeter(engine.runner)
    engine.run(Workload("warm", 64, 32, 512, 32), seed=99)
    results = []
    print(f"{'workload':18} {'in tok/s':>9} {'out tok/s':>9} {'TTFT':>7} {'floor':>6} {'TPOT':>6} {'floor':>6} "
          f"{'ITL p99':>8} {'idle us':>8}")  # fmt: skip
    for number, workload in enumerate(w for w in WORKLOADS if not args.only or w.name in args.only):
        if meter is not None:
            meter.take_us()
        took = engine.run(workload, seed=number)
        step, prompt = floors(engine, workload, limits)
        total = took["total"][0]
        result = Result(
            workload.name,
            workload.num_requests * workload.num_prompt_tokens / total,
            workload.num_requests * workload.num_output_tokens / total,
            1e3 * percentile(took["ttft"], 50),
            1e3 * statistics.mean(took["tpot"]) if took["tpot"] else float("nan"),
            1e3 * percentile(took["itl"], 99),
            meter.take_us() if meter is not None else float("nan"),
            1e3 * step,
            1e3 * prompt,
        )
        results.append(asdict(result))
        print(f"{result.name:18} {result.input_tok_s:9.0f} {result.output_tok_s:9.0f} {result.ttft_ms:7.1f} "
              f"{result.floor_ttft_ms:6.1f} {result.tpot_ms:6.2f} {result.floor_tpot_ms:6.2f} "
              f"{result.itl_p99_ms:8.1f} {result.idle_us:8.1f}", flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    if engine.ranks is not None:
        engine.ranks.close()


if __name__ == "__main__":
    main()
