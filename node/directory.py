"""A node's entry in the directory: its record, and the publisher that keeps it and its blocks in Redis."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.parts import NodeInfo
from tandem.kv_connector.directory.kept import KeptElsewhere
from tandem.kv_connector.directory.kept_once import KeptOnce
from tandem.kv_connector.directory.records import NodeRecord
from tandem.node.tiers import NodeTiers

if TYPE_CHECKING:
    from tandem.kv_connector.directory.publisher import RedisPublisher

logger = logging.getLogger(__name__)


def make_kept(options: NodeOptions, pool: BlockPool) -> KeptElsewhere | None:
    """Makes what knows which blocks peers keep; None where nothing is left to anybody."""
    leaves = options.cache.keep_kv_once and options.redis_url and pool.enable_caching
    return KeptElsewhere() if leaves else None


def make_kept_once(pool: BlockPool, kept: KeptElsewhere | None, tiers: NodeTiers | None) -> KeptOnce | None:
    """Makes what leaves blocks to peers, with a host tier or without one; None: nothing is left."""
    if kept is None:
        return None
    if tiers is None:
        return KeptOnce(pool, kept)
    return KeptOnce(pool, kept, tiers.manager.is_only_way, tiers.manager.is_whole_below)


def make_publisher(
    options: NodeOptions, info: NodeInfo, num_blocks: int, kept: KeptElsewhere | None = None
) -> RedisPublisher | None:
    """Makes the publisher, which tells `kept` what peers keep; None without a Redis."""
    if not options.redis_url:
        if options.ready_fd < 0:  # nobody started it who would tell its router
            logger.info("there is no --redis-url: routers find this node by --node %s alone", info.control_address)
        return None
    from tandem.kv_connector.directory.publisher import RedisPublisher

    record = make_record(info, num_blocks, options.cache.block_size)
    return RedisPublisher(options.redis_url, options.namespace, record, kept=kept)


def make_record(info: NodeInfo, num_blocks: int, block_size: int) -> NodeRecord:
    assert info.identity is not None
    identity = info.identity.key()
    return NodeRecord(
        node_id=info.node_id,
        epoch=info.epoch,
        role=info.role,
        control_address=info.control_address,
        model_name=info.model_name,
        num_blocks=num_blocks,
        block_size=block_size,
        identity_key=identity,
    )
