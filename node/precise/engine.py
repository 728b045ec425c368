"""A small engine with KV of 16 bits (or more) beside a node whose pool is of fp8: it serves the requests whose keys or
values fp8 can't hold (docs/layouts.md). The model's weights are shared; blocks, slots and scheduler are its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.device.kv_pool import MIN_BLOCKS, allocate_pool, make_layout
from tandem.engine.media.slots import make_media_slots
from tandem.engine.running.runner import ModelRunner
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.core import EngineCore
from tandem.engine.scheduling.scheduler import Scheduler
from tandem.engine.structured.grammars import Grammars
from tandem.engine.structured.guides import Guides
from tandem.kernels.blocks.quantization import FP8_DTYPE
from tandem.node.precise.another_cache import OverAnotherCache
from tandem.node.setup import LoadedModel

MAX_SEQS = 8  # sequences that run in it at the same time: few overflow; a guess


@dataclass(frozen=True)
class PreciseKV:
    """The engine and two of its parts."""

    core: EngineCore
    runner: ModelRunner
    scheduler: Scheduler


def raises_precision(loaded: LoadedModel, options: NodeOptions) -> bool:
    """Whether requests that overflow this node's pool end here, to be served with more precise KV. Raises ConfigError
    for options and models beside which there is no such KV."""
    if not options.cache.precise_kv_tokens or getattr(torch, loaded.layout.group.dtype) != FP8_DTYPE:
        return False
    for reason, is_so in (
        ("--enable-lora", loaded.adapters is not None),
        ("--tensor-parallel-size", loaded.model.group is not None),
        ("a model with an encoder", loaded.model.encoder is not None),
    ):
        if is_so:
            raise ConfigError(f"--precise-kv-tokens can't be served with {reason}: leave one of them out")
    return True


def precise_layout(loaded: LoadedModel, options: NodeOptions) -> tuple[KVLayout, int]:
    """The layout of the precise pool, and its number of blocks; 0: the node has none. Prefill nodes have none: requests
    that overflow there are served whole by a decode node."""
    block_size = options.cache.block_size
    layout = make_layout(loaded.config, block_size, loaded.dtype)
    if options.role == "prefill" or not raises_precision(loaded, options):
        return layout, 0
    tokens = min(options.cache.precise_kv_tokens, MAX_SEQS * loaded.max_model_len)
    return layout, max(MIN_BLOCKS, -(-tokens // block_size))


def make_precise_kv(loaded: LoadedModel, options: NodeOptions, grammars: Grammars) -> PreciseKV | None:
    """Makes the engine beside; None: the node has no precise pool. Raises ConfigError when there is no memory for
    one."""
    layout, num_blocks = precise_layout(loaded, options)
    if not num_blocks:
        return None
    few = replace(options.scheduler, max_num_seqs=MAX_SEQS, share_prefixes=False, speculative_config="")
    model = OverAnotherCache(loaded.model)
    runner = ModelRunner(
        model,
        allocate_pool(layout, num_blocks, loaded.device),
        few,
        layout.block_size,
        loaded.max_model_len,
        loaded.config.eos_token_ids,
        guides=Guides(grammars),
        media=make_media_slots(model.media_encoder, MAX_SEQS, options.cache.media_cache_bytes, loaded.device),
    )
    state = SchedulerState(
        few,
        BlockPool(num_blocks, enable_caching=False),
        block_size=layout.block_size,
        max_model_len=loaded.max_model_len,
        eos_token_ids=loaded.config.eos_token_ids,
        root_for_salt=lambda salt: salt,
    )
    scheduler = Scheduler(state)
    return PreciseKV(EngineCore(scheduler, runner, pipelined=False), runner, scheduler)
