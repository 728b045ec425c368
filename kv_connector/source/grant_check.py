"""The checks that a source makes of a grant before the first write under it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from tandem.engine.contracts.errors import GrantError
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.kv_connector.layouts.granted_blocks import GrantedBlocks
from tandem.kv_connector.source.record import SourceRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys

MAX_USED_GRANTS = 65536  # a guess


class GrantCheck:
    """Checks grants, and remembers those that this node has used so that none is used twice."""

    def __init__(self, keys: ClusterKeys, node_id: str) -> None:
        self._keys = keys
        self._node_id = node_id
        self._used: OrderedDict[int, None] = OrderedDict()

    def check(self, record: SourceRecord, grant: KVGrant) -> None:
        """Raises GrantError unless `grant` is genuine, unused, and for exactly this prompt and pair of nodes."""
        self._keys.check_grant(grant)
        if grant.source_id != self._node_id or grant.sink_id != record.peer.node_id:
            raise GrantError(f"grant {grant.grant_id:#x} is for another pair of nodes", request_id=grant.request_id)
        if grant.grant_id in self._used and grant.grant_id != record.machine.grant_id:
            raise GrantError(f"grant {grant.grant_id:#x} was used before", request_id=grant.request_id)
        blocks = GrantedBlocks(grant.first_block, grant.first_window, record.blocks_each)
        sizes = (len(grant.block_ids), grant.num_prompt_tokens)
        if sizes != (blocks.count(record.num_sink_blocks), record.num_prompt_tokens) or not grant.block_ids:
            raise GrantError(f"grant {grant.grant_id:#x} does not fit the prompt", request_id=grant.request_id)
        first_read = grant.first_block if record.blocks_each == 1 else grant.first_window
        if first_read * record.block_sizes.sink < record.first_kept:
            raise GrantError(f"grant {grant.grant_id:#x} is for blocks that slid out", request_id=grant.request_id)

    def note_use(self, grant_id: int) -> None:
        self._used[grant_id] = None
        if len(self._used) > MAX_USED_GRANTS:
            self._used.popitem(last=False)
