"""What a node says about itself: the counters in its status, the line that tells that it serves."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from tandem.kernels.api.selection import fallback_counts
from tandem.kernels.blocks.quantization import overflow_counts
from tandem.kernels.check.compilations import CompilationCounter

if TYPE_CHECKING:
    from tandem.node.process import NodeProcess

logger = logging.getLogger(__name__)


def node_counters(process: NodeProcess, compilations: CompilationCounter) -> dict[str, float]:
    """Of everything around the node's logic."""
    return {
        **process.transfer.counters,
        **process.transports.counters,
        **process.control.counters.as_dict(),
        **process.runner.counters,
        **(process.publisher.counters() if process.publisher is not None else {}),
        **(process.tiers.counters() if process.tiers is not None else {}),
        **(process.turn_times.counters if process.turn_times is not None else {}),
        "busy_s": process.loop.busy_s,
        "attention_fallbacks": float(sum(fallback_counts().values())),
        "kernels_compiled_late": float(compilations.num_late),
        # Here, or on the way from here into a sink's fp8 pool. Where no fp8 was ever made, no device is waited for.
        "kv_overflows": float(sum(overflow_counts().values())),
    }


def announce(process: NodeProcess) -> None:
    """To the log and, where one waits for it, down the pipe to whoever started this process."""
    info = process.info
    logger.info(
        "%s serves %s at %s: %d KV blocks of %d tokens on %s, attention by %s",
        info.node_id,
        info.model_name,
        info.control_address,
        process.pool.num_blocks,
        process.options.cache.block_size,
        process.loaded.device,
        _attention_backend(process),
    )
    process.launcher.ready(node_id=info.node_id, address=info.control_address, pid=os.getpid())


def _attention_backend(process: NodeProcess) -> str:
    loaded = process.loaded
    layer = next(iter(loaded.model.attention_layers.values()))
    return layer.backends(loaded.device, loaded.dtype, layer.spec.attn_type)[0].get_name()
