"""How much device memory the KV pool may take: what is free after the worst step that can come."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.runner_needs import AdapterMemory, Model

DRIVER_BYTES_PER_GRAPH = 16 << 20  # generous; what the driver keeps for a graph of some 400 kernels; a guess
DRIVER_BYTES_PER_LAYER = 1 << 19  # the same for a layer of a prompt's graph, of some ten; a guess


def profile_free_bytes(
    model: Model,
    layout: KVLayout,
    options: SchedulerOptions,
    max_model_len: int,
    device: torch.device,
    gpu_memory_utilization: float,
    cuda_graphs: bool,
    adapters: AdapterMemory | None = None,
    prompt_graph_tokens: int = 0,
    prompt_graph_attention: bool = False,
) -> int:
    """CUDA bytes left for the pool: the share of the device's memory we may use, less what the worst step needs.

    Runs that step on a pool of one block, which is dropped again. Memory that other processes hold counts as used.
    `cuda_graphs`: the node will capture decode steps, whose memory stays taken beside that of other steps, and steps
    with prompts of up to `prompt_graph_tokens` tokens, `prompt_graph_attention`: with their attention.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    pool = allocate_pool(layout, 1, device)
    places = layout.group.places
    runner = ModelRunner(model, pool, options, layout.block_size, max_model_len, (), adapters=adapters, places=places)
    runner.warmup()
    peak = torch.cuda.max_memory_reserved(device)
    if cuda_graphs:
        peak += _graph_bytes(runner, device)
        peak += _prompt_graph_bytes(runner, device, prompt_graph_tokens, prompt_graph_attention)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    return int(total * gpu_memory_utilization) - peak - others


def graph_bytes(
    model: Model, layout: KVLayout, options: SchedulerOptions, max_model_len: int, device: torch.device
) -> int:
    """The bytes that captured steps of another model on the device will hold. Whatever else its steps take is free when
    they run."""
    pool = allocate_pool(layout, 1, device)
    runner = ModelRunner(model, pool, options, layout.block_size, max_model_len, ())
    runner.warmup()
    return _graph_bytes(runner, device)


def _graph_bytes(runner: ModelRunner, device: torch.device) -> int:
    """What captured decode steps will hold: one largest step (they share its memory) and the driver's own part."""

    def compute_largest() -> int:
        graphs = runner.new_graphs()
        graphs.batch.fill((), runner.max_graph_rows)
        graphs.batch.forward(runner.max_graph_rows, with_adapters="adapted" in graphs.sizes_of)
        return graphs.num_graphs * DRIVER_BYTES_PER_GRAPH

    return _held_bytes(compute_largest, device)


def _prompt_graph_bytes(runner: ModelRunner, device: torch.device, max_tokens: int, with_attention: bool) -> int:
    """The same of captured steps with prompts, and the tensors between their segments."""

    def compute_largest() -> int:
        graphs = runner.new_prompt_graphs(max_tokens, with_attention)
        if graphs is None:
            return 0
        graphs.warm_up(graphs.sizes[-1])
        return graphs.num_layers * DRIVER_BYTES_PER_LAYER

    return _held_bytes(compute_largest, device)


@torch.inference_mode()
def _held_bytes(compute_largest: Callable[[], int], device: torch.device) -> int:
    """What graphs will hold whose largest step that makes and computes, with the driver's part, which it returns."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    of_driver = compute_largest()
    return int(1.25 * (torch.cuda.max_memory_allocated(device) - before)) + of_driver
