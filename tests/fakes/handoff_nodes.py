"""One life of each node around the real hand-off managers: scheduler, transfer thread and memory in short."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from tandem.engine.blocks.pool import BlockPool
from tandem.engine.contracts.config import CacheOptions, ModelOptions, NodeOptions
from tandem.engine.contracts.kv_layout import KVGroup, KVLayout
from tandem.engine.contracts.security import ClusterKeys
from tandem.engine.contracts.wire.parts import FirstToken, NodeInfo
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.layouts.plan import BlockSizes
from tandem.kv_connector.protocol.jobs import BlockPush
from tandem.kv_connector.sink.manager import SinkManager
from tandem.kv_connector.source.manager import SourceManager

BLOCK = 4
KEYS = ClusterKeys(b"k" * 16, False)


class Prefill:
    """One life of a source: its manager, a scheduler that computes a prompt in one step, its transfer queue."""

    def __init__(self, epoch: int, num_blocks: int) -> None:
        options = NodeOptions("prefill", ModelOptions("m"), CacheOptions(block_size=BLOCK, hash_block_size=BLOCK))
        self.epoch, self.info = epoch, NodeInfo(node_id="p", epoch=epoch, role="prefill")
        self.pool = BlockPool(num_blocks, enable_caching=True)
        self.manager = SourceManager(self.info, KEYS, self.pool, options, whole_up_to=BLOCK * (epoch % 4))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.jobs: deque[Any] = deque()
        self.retired: set[int] = set()
        self.step_id = self.next_slot = 0  # slots are never reused here

    def step(self) -> None:
        for request in list(self.waiting):
            if self.manager.prompts.get_num_new_matched_tokens(request, 0) is None:
                continue
            blocks = self.pool.allocate(-(-request.num_prompt_tokens // BLOCK))
            if blocks is None:
                continue
            self.waiting.remove(request)
            self.running.append(request)
            request.block_ids, request.slot = blocks, self.next_slot
            self.next_slot += 1
            self.manager.prompts.update_state_after_alloc(request, blocks, 0)

    def compute(self, request: Request) -> None:
        self.running.remove(request)
        self.step_id += 1
        row = SimpleNamespace(slot=request.slot, start=0, num_tokens=request.num_prompt_tokens)
        meta = self.manager.prompts.build_connector_meta(SimpleNamespace(step_id=self.step_id, rows=(row,)))  # type: ignore[arg-type]
        self.pool.step_launched(self.step_id)
        self.jobs.extend((*meta.whole, *meta.pushes) if meta is not None else ())
        request.first_tokens = [FirstToken(0, 1, False)]
        self.pool.step_completed(self.step_id)
        self.leave(request)

    def leave(self, request: Request) -> None:
        if not self.manager.prompts.request_finished(request, request.block_ids):
            self.pool.free(request.block_ids, None)

    def drop(self, key: tuple[str, int]) -> None:
        for request in [r for r in self.waiting + self.running if r.key == key]:
            (self.waiting if request in self.waiting else self.running).remove(request)
            self.leave(request)


class Decode:
    """One life of a sink, with blocks of its own size."""

    def __init__(self, epoch: int, num_blocks: int, block_size: int = BLOCK) -> None:
        cache = CacheOptions(block_size=block_size, hash_block_size=1)
        options = NodeOptions("decode", ModelOptions("m"), cache)
        layout = KVLayout((KVGroup(1, 1, 1, "float32"),), block_size)
        self.epoch, self.info = epoch, NodeInfo(node_id="d", epoch=epoch, role="decode", layout=layout)
        self.block_sizes = BlockSizes(BLOCK, block_size)
        self.pool = BlockPool(num_blocks, enable_caching=True)
        self.manager = SinkManager(self.info, KEYS, self.pool, options)
        self.jobs: deque[Any] = deque()
        self.bytes: dict[int, tuple[int, bool]] = {}  # block -> (grant that wrote it last, right)
        self.line: list[Any] = []

    def land(self, grant: Any, blocks: tuple[int, ...], right: bool) -> None:
        if grant.sink_epoch != self.epoch:
            return  # another life's memory
        record = self.manager.ledger.records.get((grant.request_id, grant.attempt))
        held = record.granted if record is not None and record.grant is not None else []
        for block in blocks:
            assert block in held, "a write lands in a block that its grant no longer holds"
            self.bytes[block] = (grant.grant_id, right)

    def check_origin(self, source: Prefill, job: BlockPush) -> None:
        """A push takes each token of its sink blocks from the prompt's place for it, in blocks that are held."""
        record = source.manager.ledger.records[job.key]
        slots = job.first_slots or (0,) * len(job.num_valid)
        made = self.block_sizes.parts(job.source_block_ids, slots, job.num_valid)
        for block, parts in zip(job.destination_block_ids, made, strict=True):
            token = (job.grant.first_block + job.grant.block_ids.index(block)) * self.block_sizes.sink
            for part in parts:
                assert source.pool.ref_count(part.source_block) > 0, "a push reads a block that was freed"
                place = record.block_ids.index(part.source_block) * BLOCK + part.source_slot
                assert place == token + part.sink_slot, "a token goes to another's place"

    def check_order(self) -> None:
        line = list(self.manager.line._queue)
        common = [record for record in self.line if record in line]
        assert line[: len(common)] == common, "claims changed their order"
        self.line = line
