"""Scales of fp8 KV measured on prompts: the model serves them over a pool of its own dtype, which is then looked at.

So keys are seen as they are stored, rotated and normed, whichever kernels wrote them. A scale a layer, for keys and for
values, since that is what the kernels take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import SchedulerOptions
from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.sampling_params import SamplingParams
from tandem.engine.device.kv_encoding import LayerScales
from tandem.engine.device.kv_pool import allocate_pool
from tandem.engine.running.runner import ModelRunner
from tandem.engine.running.runner_needs import Model
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.request import Prompt, Request
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.kernels.blocks.quantization import dequantize, quantize, scale_for

NUM_OUTPUT_TOKENS = 16  # made after each prompt, so that the model's own words count, too; a guess
RANDOM_PROMPTS = (64, 256, 512)  # lengths in tokens; a guess


class MeasuredScales(NamedTuple):
    """Scales, and by layer the root mean square of what fp8 changes in keys and values, of that of the values."""

    scales: LayerScales
    k_errors: tuple[float, ...]
    v_errors: tuple[float, ...]


def measure_kv_scales(
    model: Model,
    layout: KVLayout,
    options: SchedulerOptions,
    max_model_len: int,
    device: torch.device,
    prompts: Sequence[Sequence[int]],
) -> MeasuredScales:
    """Serves `prompts` (token ids) one after another. `layout`: of a pool in the model's dtype. The model is bound to
    that pool afterwards. Raises RuntimeError when a prompt fails."""
    planes = [_kv_of(model, layout, options, max_model_len, device, prompt) for prompt in prompts]
    found = []
    for layer in range(layout.group.num_layers):
        for plane in (0, 1):
            values = torch.cat([each[layer, plane].flatten() for each in planes]).float()
            scale = float(scale_for(values))
            kept = dequantize(quantize(values, scale, counts=False), scale, torch.float32)
            found.append((scale, float((kept - values).norm() / values.norm().clamp_min(1e-30))))
    (k_scales, k_errors), (v_scales, v_errors) = zip(*found[::2], strict=True), zip(*found[1::2], strict=True)
    return MeasuredScales(LayerScales(k_scales, v_scales), k_errors, v_errors)


def scales_of_random_prompts(
    model: Model, layout: KVLayout, options: SchedulerOptions, max_model_len: int, device: torch.device
) -> LayerScales:
    """Measures scales as `measure_kv_scales` does, on prompts of random tokens that are the same on every node, and
    rounds them up to powers of two: nodes whose products differ in their last bits still get equal scales, and fp8
    loses nothing by such a factor."""
    generator = np.random.default_rng(0)
    lengths = (min(length, max_model_len // 2) for length in RANDOM_PROMPTS)
    prompts = [generator.integers(0, model.vocab_size, length).tolist() for length in lengths]
    measured = measure_kv_scales(model, layout, options, max_model_len, device, prompts).scales
    k, v = (tuple(2.0 ** math.ceil(math.log2(scale)) for scale in each) for each in (measured.k, measured.v))
    return LayerScales(k, v)


def _kv_of(
    model: Model, layout: KVLayout, options: SchedulerOptions, max_model_len: int, device: torch.device,
    prompt: Sequence[int],
) -> torch.Tensor:  # fmt: skip
    """KV of one prompt and its continuation, on the CPU: [num_layers, 2, num_kv_heads, num_blocks, block_size,
    head_dim], zeros where there is no token."""
    prompt = prompt[: max_model_len - NUM_OUTPUT_TOKENS - 1]
    num_blocks = -(-(len(prompt) + NUM_OUTPUT_TOKENS) // layout.block_size) + 1
    pool = allocate_pool(layout, num_blocks, device)
    runner = ModelRunner(model, pool, options, layout.block_size, max_model_len, ())
    state = SchedulerState(
        options,
        BlockPool(num_blocks, enable_caching=False),
        block_size=layout.block_size,
        max_model_len=max_model_len,
        eos_token_ids=(),
        root_for_salt=lambda salt: salt,
    )
    core = EngineCore(Scheduler(state), runner, pipelined=False)
    sampling = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    state.add(Request(Prompt(AttemptKey("kv scales", 1), np.array(prompt, np.int32), sampling)))
    num_tokens = 0
    while core.has_work():
        num_tokens += len(core.step())
    if num_tokens < NUM_OUTPUT_TOKENS:
        raise RuntimeError(f"a prompt of {len(prompt)} tokens could not be computed")
    return pool.permute(2, 3, 1, 0, 4, 5).to("cpu", copy=True)
