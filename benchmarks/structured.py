"""Decoding under grammars beside free decoding: the same engine, requests and lengths, in one run.

    python benchmarks/structured.py [MODEL_FOLDER] [--load-format dummy] [--streams 64] [--tokens 192] [--rounds 3]
                                    [--temperature 0.7] [--max-model-len 2048] [--eager]

Every request has a schema of its own with strings, numbers and nested objects, and goes on until its last token.
`cold` has grammars that nobody has compiled before, `warm` those of the round before, `half` the same for every other
request. Tokens a second of decoding, first tokens left out; `ratio` to free decoding, the figure to compare; `fill` is
the median time in which the masks of a step are filled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import tandem.deploy
from engine import Engine, make_request
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.structured.guides import GuidedSamples

DEMO = str(Path(tandem.deploy.__file__).parent / "demo_model")
NUM_PROMPT_TOKENS = 64


def schema(index: int) -> str:
    """A grammar for an array that is never long enough to end, of records whose members differ from others'."""
    record = {
        "type": "object",
        "properties": {
            f"name_{index}": {"type": "string", "maxLength": 24},
            f"count_{index}": {"type": "integer", "minimum": 0, "maximum": 9999},
            "tags": {"type": "array", "items": {"enum": [f"t{index}", "red", "green"]}, "maxItems": 4},
            "inner": {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "boolean"}},
                      "required": ["x", "y"], "additionalProperties": False},
        },
        "required": [f"name_{index}", f"count_{index}", "tags", "inner"],
        "additionalProperties": False,
    }  # fmt: skip
    whole = {"type": "array", "items": record, "minItems": 500, "x-guidance": {"whitespace_flexible": False}}
    return json.dumps({"grammars": [{"json_schema": whole}]})


def decode(engine: Engine, label: str, grammars: Sequence[str], tokens: int, temperature: float) -> float:
    """Tokens a second, from when every request has its first."""
    rng = np.random.default_rng(len(label))
    state = engine.core.scheduler.state
    for index, grammar in enumerate(grammars):
        prompt = rng.integers(10, 2000, NUM_PROMPT_TOKENS, dtype=np.int32)
        sampling = SamplingParams(
            max_tokens=tokens, temperature=temperature, seed=index, ignore_eos=True, grammar=grammar
        )
        state.add(make_request(f"{label}-{index}", prompt, sampling))
    return engine.decode_rate(len(grammars))


class FillMeter:
    """How long the masks of steps take."""

    def __init__(self) -> None:
        self.took_ms: list[float] = []
        fill = GuidedSamples.fill

        def timed(guided: GuidedSamples, masks: np.ndarray) -> None:
            began_at = time.perf_counter()
            fill(guided, masks)
            self.took_ms.append(1e3 * (time.perf_counter() - began_at))

        GuidedSamples.fill = timed  # type: ignore[method-assign]

    def take(self) -> float:
        took, self.took_ms = self.took_ms, []
        return statistics.median(took) if took else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    engine = Engine(args.model, args.load_format, not args.eager, args.max_model_len)
    meter = FillMeter()
    size = args.tokens, args.temperature
    decode(engine, "warm", [""] * args.streams, *size)
    ratios: dict[str, list[float]] = {}
    print(f"{'':6} {'tok/s':>9} {'ratio':>6} {'fill ms':>8}")
    for turn in range(args.rounds):
        own = [schema(turn * args.streams + i) for i in range(args.streams)]
        half = [grammar if i % 2 else "" for i, grammar in enumerate(own)]
        free = 0.0
        for label, grammars in (("free", [""] * args.streams), ("cold", own), ("warm", own), ("half", half)):
            rate = decode(engine, f"{label}-{turn}", grammars, *size)
            free = free or rate
            ratios.setdefault(label, []).append(rate / free)
            print(f"{label:6} {rate:9.0f} {rate / free:6.3f} {meter.take():8.3f}", flush=True)
    print("median ratios:", *(f"{label} {statistics.median(found):.3f}" for label, found in ratios.items()))


if __name__ == "__main__":
    main()
