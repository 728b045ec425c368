"""Slow steps that nodes took in serving, beside what the simulator would have charged for them. No GPU.

    python benchmarks/step_costs.py FOLDER

FOLDER is that of `--handoff-trace`: nodes write there each step longer than 1 ms beyond the time a token that they
promise, so nearly every one with a launched chunk of a prompt. Medians by prompt tokens: what is in the step, ms of
the whole turn in which its results came, of waiting for the device and of the launch in that turn, which is that of the
step after it, CPU ms, and what the simulator's cost model says of the step (an 8B model in bf16 on an H200). So a long
launch stands beside the step before, mostly one of decodes alone. `sum` is the time of all turns, beside it the share
of what the model says of their steps: take the two of all rows together.
"""

from __future__ import annotations

import argparse
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from handoff_timeline import read_folder

from tandem.deploy.bench.simulated.costs import CostModel
from tandem.deploy.explain import table

BOUNDS = (0, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
MEDIANS = ("place", "rows", "context", "total", "device", "launch", "cpu")


def modelled_ms(step: dict[str, Any], costs: CostModel) -> float:
    num_tokens, num_decodes = step["prompt_tokens"], step["rows"] - step["chunks"]
    prompt_s = costs.prompt_s(step["place"] - num_tokens // 2, num_tokens)
    return 1e3 * (costs.decode_s(num_decodes, step["context"]) + prompt_s)


def report(steps: Iterable[dict[str, Any]]) -> str:
    by_bound: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for step in steps:
        by_bound[next((bound for bound in BOUNDS if step["prompt_tokens"] <= bound), BOUNDS[-1])].append(step)
    rows, costs = [], CostModel()
    for bound, group in sorted(by_bound.items()):
        modelled = [modelled_ms(step, costs) for step in group]
        medians = [statistics.median(step[name] for step in group) for name in MEDIANS]
        taken_s = sum(step["total"] for step in group) / 1e3
        taken = [f"{taken_s:.1f}", f"{taken_s / sum(modelled) * 1e3:.2f}"]
        medians.append(statistics.median(modelled))
        rows.append([f"to {bound}", str(len(group)), *(f"{median:.4g}" for median in medians), *taken])
    return table(["prompt tokens", "steps", *MEDIANS, "modelled", "sum s", "of modelled"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    lines = read_folder(parser.parse_args().folder)
    print(report(line for line in lines if line["stage"] == "slow step"))


if __name__ == "__main__":
    main()
