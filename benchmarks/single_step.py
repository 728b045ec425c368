"""A decode step of one row over weights of 8 or 4 bits: weights asked for while a norm or an attention runs, or not.

    python benchmarks/single_step.py MODEL_FOLDER [--quantization fp8] [--ahead 0 1 2 3] [--length 512]

Weights are made up from config.json, which says how they are quantised unless --quantization does. Each way is a step
as served (norms, attention over one row of --length tokens, products, the output matrix, the embedding) in a graph
of its own; they take turns, so the clock is the same. Ends with the way that `quantised_plans.AHEAD` takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable

import torch

from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions, SchedulerOptions
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.running.decode_graphs import DecodeGraphs
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.step import ScheduledRow
from tandem.kernels.check.measure import event_seconds
from tandem.kernels.products import quantised, quantised_plans
from tandem.node.setup import load, with_device_defaults

STEPS = 20  # of one measurement, back to back
ROUNDS = 15


def graphs_of(runner: ModelRunner, ways: Iterable[int]) -> dict[int, DecodeGraphs]:
    """K steps asked for early -> captured steps whose products do so."""
    made = {}
    for ahead in ways:
        quantised_plans.AHEAD = ahead
        quantised._chosen.cache_clear()
        runner.warmup()
        made[ahead] = runner.new_graphs()
        with torch.inference_mode():
            made[ahead].capture()
    return made


def milliseconds(graphs: DecodeGraphs, length: int) -> float:
    """Time of a step; the row's tokens are those of the pool's first blocks, whatever lies there."""
    graphs.run([ScheduledRow(0, length - 1, 1)])
    replay = graphs._graphs[1, "plain"].replay
    return 1e3 * event_seconds(lambda: [replay() for _ in range(STEPS)]) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--ahead", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    chosen = quantised_plans.AHEAD
    model = ModelOptions(arguments.model, load_format="dummy", max_model_len=4096, quantization=arguments.quantization)
    cache, scheduler = CacheOptions(num_blocks=64), SchedulerOptions(max_num_seqs=1)
    options = NodeOptions("unified", model, cache, scheduler, tune_products_s=0.0)
    loaded = load(options)
    options = with_device_defaults(options, loaded.device)
    pool = allocate_pool(loaded.layout, cache.num_blocks, loaded.device)
    runner = ModelRunner(loaded.model, pool, options.scheduler, cache.block_size, loaded.max_model_len, ())
    ways = graphs_of(runner, arguments.ahead)
    times: dict[int, list[float]] = {ahead: [] for ahead in ways}
    with torch.inference_mode():
        for turn in range(ROUNDS + 2):
            for ahead in ways if turn % 2 else reversed(ways):
                times[ahead].append(milliseconds(ways[ahead], arguments.length))
    for ahead, measured in times.items():
        kept = sorted(measured[2:])
        print(f"ahead {ahead}: {statistics.median(kept):.3f} ms a step ({kept[0]:.3f} to {kept[-1]:.3f})")
    print(f"as served: ahead {chosen}")


if __name__ == "__main__":
    main()
