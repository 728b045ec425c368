"""A node's KV memory, one pool or those of its ranks, and the transports by which peers reach it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.kv_layout import KVLayout
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.device.kv_pool import allocate_pool, pool_bytes
from tandem.kv_connector.layouts.rank_pools import RankPools
from tandem.kv_connector.transports.base import Transport
from tandem.kv_connector.transports.node_transports import NodeTransports, make_transports
from tandem.node.ranks.channel import PoolFile
from tandem.node.ranks.leader import Ranks
from tandem.node.ranks.shared_pool import heads_of_rank, make_storage, ranks_share_pool, ranks_show_pools, whole_layout
from tandem.node.setup import LoadedModel


@dataclass(frozen=True)
class NodePool:
    """A node's KV memory. `layout` is that of a node of one rank, whatever the number of ranks; peers are told this."""

    tensor: torch.Tensor  # whole blocks, or rank 0's part if each rank has a GPU
    own: torch.Tensor  # the heads that this process computes
    layout: KVLayout
    ranks: RankPools | None  # the parts of whole blocks if each rank has a GPU


def transports_of(options: NodeOptions, loaded: LoadedModel, keys: ClusterKeys) -> list[Transport]:
    """The transports of this node. Raises ConfigError."""
    device = loaded.device
    has_ranks = ranks_show_pools(loaded.layout, device)
    return make_transports(options.transport, device, keys, options.host, options.timeouts.peer_lost_s, has_ranks)


def allocate_node_pool(
    loaded: LoadedModel, num_blocks: int, transports: NodeTransports, ranks: Ranks | None
) -> NodePool:
    """Allocates the pool: on CPU in memory that other processes of this host can map, when a transport or ranks want
    it. A collective of the ranks. Raises ConfigError."""
    rank, device = loaded.layout, loaded.device
    shares = ranks_share_pool(rank, device)
    layout = whole_layout(rank) if shares or ranks_show_pools(rank, device) else rank
    if device.type != "cpu":
        own = allocate_pool(rank, num_blocks, device)
        if layout is rank:
            return NodePool(own, own, layout, None)
        assert loaded.model.group is not None, "a rank is in a group"
        return NodePool(own, own, layout, RankPools(own, layout, loaded.model.group.share_memory(own)))
    storage = transports.pool_storage(pool_bytes(layout, num_blocks))
    if shares:
        assert ranks is not None, "ranks that share a pool are led from here"
        place = transports.pool_file()
        if storage is None or place is None:
            storage, file = make_storage(pool_bytes(layout, num_blocks))
        else:
            file = PoolFile(*place)
        ranks.share_pool(file)
    tensor = allocate_pool(layout, num_blocks, device, storage)
    return NodePool(tensor, heads_of_rank(tensor, rank) if shares else tensor, layout, None)
