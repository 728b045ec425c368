"""A node's reports about itself: the counters in its status, and the line that tells that it serves."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.engine.process.launcher_pipe import LauncherPipe
from tandem.engine.process.version import version
from tandem.kernels.api.selection import fallback_counts
from tandem.kernels.blocks.quantization import overflow_counts
from tandem.kernels.check.compilations import CompilationCounter
from tandem.kv_connector.transports.mapped.processes import host_id
from tandem.node.setup import LoadedModel

logger = logging.getLogger(__name__)


def node_counters(compilations: CompilationCounter, *parts: Mapping[str, float]) -> dict[str, float]:
    """Counters of everything around the node's logic: `parts`, which count for themselves, and the kernels."""
    counters: dict[str, float] = {
        "attention_fallbacks": float(sum(fallback_counts().values())),
        "kernels_compiled_late": float(compilations.num_late),
        # Here, or on the way from here into a sink's fp8 pool. Where no fp8 was ever made, no device is waited for.
        "kv_overflows": float(sum(overflow_counts().values())),
    }
    for part in parts:
        counters.update(part)
    return counters


def describe(
    options: NodeOptions,
    loaded: LoadedModel,
    layout: KVLayout,
    key: NodeKey,
    address: str,
    exports: dict[str, bytes],
    precise_tokens: int,
) -> NodeInfo:
    """The description of this node that peers get. `address` is where they reach it, `exports` are its transports',
    `precise_tokens` the room for KV of 16 bits beside a pool of fp8."""
    return NodeInfo(
        node_id=key.node_id,
        epoch=key.epoch,
        role=options.role,
        control_address=address,
        host_id=host_id(),
        pid=os.getpid(),
        version=version(),
        identity=loaded.identity,
        layout=layout,
        num_ranks=options.tensor_parallel_size,
        group_size=1 if loaded.model.expert_group is None else loaded.model.expert_group.size,
        model_name=loaded.served_name,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.config.vocab_size,
        media_kinds=() if loaded.model.media_encoder is None else tuple(sorted(loaded.model.media_encoder.kinds)),
        encoder=loaded.config.encoder,
        precise_tokens=precise_tokens,
        transports=exports,
    )


def announce(info: NodeInfo, loaded: LoadedModel, pool: BlockPool, is_compiled: bool, launcher: LauncherPipe) -> None:
    """Says that the node serves: in the log and, where one waits for it, down the pipe to the launcher. Blocks are
    counted with their window blocks, where they have such."""
    num_blocks = pool.windows.most(pool.num_blocks)
    logger.info(
        "%s serves %s at %s: %d KV blocks of %d tokens on %s, attention by %s",
        info.node_id,
        info.model_name,
        info.control_address,
        num_blocks,
        loaded.layout.block_size,
        loaded.device,
        _attention_backend(loaded) + (", the rest by torch.compile" if is_compiled else ""),
    )
    launcher.ready(
        node_id=info.node_id,
        address=info.control_address,
        pid=os.getpid(),
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        num_kv_tokens=num_blocks * loaded.layout.block_size,
        kv_bytes=num_blocks * loaded.layout.group.blocks_each * loaded.layout.stride_bytes * loaded.layout.tp_size,
        max_model_len=info.max_model_len,
    )


def _attention_backend(loaded: LoadedModel) -> str:
    layer = next(iter(loaded.model.attention_layers.values()))
    return layer.backends(loaded.device, loaded.dtype, layer.spec.attn_type)[0].get_name()
