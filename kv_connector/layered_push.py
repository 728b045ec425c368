"""Pushing whole blocks some layers after others, so that a peer's forward pass can follow. On the transfer thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from tandem.engine.messages import KVLayers
from tandem.kernels.digest import BlockSums
from tandem.kernels.move_blocks import why_not_words
from tandem.kernels.push_blocks import list_rows
from tandem.kv_connector.layer_groups import layer_groups
from tandem.kv_connector.meta import WholePush, digest_key
from tandem.kv_connector.pusher import Pusher


def can_push_by_layer(pool_NHLPBD: torch.Tensor) -> bool:
    """Whether its layers can be summed by themselves."""
    return not why_not_words(pool_NHLPBD)


def push_by_layer(
    pool_NHLPBD: torch.Tensor, push: WholePush, pusher: Pusher, flush: Callable[[], None], is_over: Callable[[], bool]
) -> Iterator[KVLayers]:
    """Pushes; yields what the sink is to be told, each part when it has arrived. Raises what channels raise."""
    grant, num_layers = push.grant, pool_NHLPBD.shape[2]
    sums = BlockSums.of_none(pool_NHLPBD, len(push.source_block_ids), digest_key(*push.key, push.grant_id))
    listed = list_rows(push.source_block_ids, pool_NHLPBD.shape[4], pool_NHLPBD.device)
    for layers in layer_groups(num_layers):
        if is_over():
            return
        sums.add_layers(pool_NHLPBD, listed, layers)
        pusher.push(push, layers)
        flush()
        yield KVLayers(
            request_id=grant.request_id,
            attempt=grant.attempt,
            grant_id=grant.grant_id,
            grant_signature=grant.signature,
            source_id=grant.source_id,
            source_epoch=grant.source_epoch,
            sink_epoch=grant.sink_epoch,
            num_layers=layers.stop,
            sums=sums.on_host().sums_N.numpy().astype("<i8").tobytes(),
        )
