"""CPU time of a decode step's layer, by our own modules and by those of transformers. No GPU.

    python benchmarks/layer_cost.py [--rows 1] [--steps 200]

A tiny Llama's step on one thread: what is computed is small beside the Python around it. Microseconds of CPU time a
layer (lowest deciles): the difference between steps of 18 and of 2 layers, over 16. Attention is its part of them, the
same for both: the store, and the native backend's gathering.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from tandem.engine.contracts.config import ModelOptions
from tandem.engine.models.choice import load_chosen, load_config
from tandem.engine.running.runner_needs import Model
from tandem.kernels.api.attention import bind_kv_cache
from tandem.kernels.api.forward_context import ForwardContext, set_forward_context
from tandem.kernels.api.metadata import AttentionMetadata, AttentionMetadataBuilder

FEW, MANY = 2, 18
BLOCK, LENGTH = 16, 20
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}
CPU = torch.device("cpu")


def load(impl: str, num_layers: int) -> Model:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": num_layers}))
        options = ModelOptions(str(folder), load_format="dummy", model_impl=impl)  # type: ignore[arg-type]
        return load_chosen(folder, load_config(folder, options), options, CPU, torch.float32)


def decode_rows(num_rows: int) -> AttentionMetadata:
    tables = torch.arange(2 * num_rows, dtype=torch.int32).reshape(num_rows, 2)
    slots = tables[:, LENGTH // BLOCK].long() * BLOCK + (LENGTH - 1) % BLOCK
    return AttentionMetadataBuilder().build([1] * num_rows, [LENGTH] * num_rows, tables, slots, CPU)


def step_us(model: Model, num_rows: int, num_steps: int) -> float:
    config = model.config
    shape = (2 * num_rows, config.num_kv_heads, config.num_layers, 2, BLOCK, config.head_dim)
    bind_kv_cache(model.attention_layers, torch.zeros(shape))
    tokens, positions = torch.ones(num_rows, dtype=torch.int64), torch.full((num_rows,), LENGTH - 1)
    took = []
    for _ in range(num_steps):
        metadata = decode_rows(num_rows)
        with torch.inference_mode(), set_forward_context(ForwardContext(metadata, model.attention_layers)):
            begin = time.thread_time_ns()
            model(tokens, positions)
            took.append(time.thread_time_ns() - begin)
    return statistics.quantiles(took, n=10)[0] / 1000


def attention_us(model: Model, num_rows: int, num_steps: int) -> float:
    layer, config = next(iter(model.attention_layers.values())), model.config
    q = torch.zeros(num_rows, layer.spec.num_heads, config.head_dim)
    k = torch.zeros(num_rows, config.num_kv_heads, config.head_dim)
    metadata = decode_rows(num_rows)
    took = []
    with torch.inference_mode():
        for _ in range(num_steps):
            begin = time.thread_time_ns()
            layer(q, k, k, layer.kv_cache[0], metadata)
            took.append(time.thread_time_ns() - begin)
    return statistics.quantiles(took, n=10)[0] / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    cost = {}
    for impl in ("tandem", "transformers"):
        few, many = load(impl, FEW), load(impl, MANY)
        times = [step_us(model, arguments.rows, arguments.steps) for model in (few, many)]
        cost[impl] = (times[1] - times[0]) / (MANY - FEW)
        attention = attention_us(few, arguments.rows, arguments.steps)
        print(f"{impl:13} {cost[impl]:6.0f} us a layer, {attention:.0f} of them attention")
    print(f"ratio {cost['transformers'] / cost['tandem']:.2f}")


if __name__ == "__main__":
    main()
