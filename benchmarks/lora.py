"""Decoding with adapters beside decoding without any: the same engine, requests and lengths, in one run.

    python benchmarks/lora.py [MODEL_FOLDER] [--load-format dummy] [--streams 64] [--prompt-tokens 512] [--tokens 192]
                              [--adapters 1 8 64] [--rank 16] [--targets q_proj v_proj ...] [--rounds 3] [--eager]

Adapters are random, of all targets in all layers. Tokens a second of decoding, first tokens left out; `slower` is how
much more time a token takes than without adapters in the same round (targets at most 10, 15 and 25 % for 1, 8 and 64
on the 8B shape); `floor` is what reading the adapters' bytes would take of a step that reads the weights and does
nothing else: of a real step it is less (docs/measurements.md#adapters).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import tandem.deploy
from engine import Engine
from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.adapters.layout import AdapterLayout
from tandem.engine.adapters.node_adapters import NodeAdapters
from tandem.engine.contracts.config import LoraOptions
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.contracts.wire.parts import AdapterRef
from tandem.engine.scheduling.request import Prompt, Request

DEMO = str(Path(tandem.deploy.__file__).parent / "demo_model")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapters(adapters: NodeAdapters, number: int, rank: int, targets: Sequence[str]) -> list[HostAdapter]:
    """Adapters of one random memory, which is copied for each of them into its slot on the device."""
    layout = adapters.loader.layout
    words = 0.01 * torch.randn(layout.num_elements)
    ranks = torch.zeros((len(layout.projections), 3), dtype=torch.int32)
    for index, projection in enumerate(layout.projections):
        for part, module in enumerate(projection.site.parts):
            ranks[index, part] = rank if module.module.endswith(tuple(targets)) else 0
    words = words.to(next(iter(adapters.stacks.values())).a.dtype)
    if torch.cuda.is_available():
        words, ranks = words.pin_memory(), ranks.pin_memory()
    return [adapters.store.add(HostAdapter(index.to_bytes(4, "big"), words, ranks)) for index in range(number)]


def bytes_of(layout: AdapterLayout, adapter: HostAdapter) -> int:
    """The bytes of an adapter that a step reads."""
    elements = 0
    for projection, ranks in zip(layout.projections, adapter.ranks.tolist(), strict=True):
        for size, rank in zip(projection.part_sizes, ranks, strict=False):
            elements += rank * (projection.num_inputs + size)
    return elements * adapter.words.element_size()


def decode(engine: Engine, label: str, used: Sequence[HostAdapter], args: argparse.Namespace) -> float:
    """Tokens a second, from when every request has its first."""
    rng = np.random.default_rng(1)
    state = engine.core.scheduler.state
    sampling = SamplingParams(max_tokens=args.tokens, temperature=0.0, ignore_eos=True)
    for index in range(args.streams):
        tokens = rng.integers(10, 500, args.prompt_tokens, dtype=np.int32)
        ref = AdapterRef("", used[index % len(used)].digest) if used else None
        key = AttemptKey(f"{label}-{index}", 0)
        state.add(Request(Prompt(key, tokens, sampling, use_prefix_cache=False, adapter=ref)))
    return engine.decode_rate(args.streams)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEMO)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    lora = LoraOptions(enable_lora=True, max_loras=max(args.adapters), max_lora_rank=args.rank)
    engine = Engine(args.model, args.load_format, not args.eager, args.max_model_len, lora=lora)
    assert engine.loaded.adapters is not None
    made = make_adapters(engine.loaded.adapters, max(args.adapters), args.rank, args.targets)
    own, model = bytes_of(engine.loaded.adapters.loader.layout, made[0]), model_bytes(engine)
    print(f"an adapter reads {own / 1e6:.1f} MB a step, the model {model / 1e9:.2f} GB")
    slower: dict[int, list[float]] = {number: [] for number in args.adapters}
    print(f"{'adapters':>8} {'tok/s':>9} {'slower':>7} {'floor':>7}")
    for turn in range(-1, args.rounds):  # the first is for warmth
        plain = decode(engine, f"{turn}-0", (), args)
        if turn >= 0:
            print(f"{0:8} {plain:9.0f}", flush=True)
        for number in args.adapters:
            rate = decode(engine, f"{turn}-{number}", made[:number], args)
            if turn >= 0:
                slower[number].append(plain / rate - 1)
                floor = min(number, args.streams) * own / model
                print(f"{number:8} {rate:9.0f} {plain / rate - 1:7.1%} {floor:7.1%}", flush=True)
    print("median:", *(f"{number}: {statistics.median(found):.1%}" for number, found in slower.items()))


def model_bytes(engine: Engine) -> int:
    assert isinstance(engine.loaded.model, torch.nn.Module)
    return sum(parameter.nbytes for parameter in engine.loaded.model.parameters())


if __name__ == "__main__":
    main()
