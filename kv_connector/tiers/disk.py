"""The disk tier's thread: blocks between the host pool and the file, with a digest of each."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from tandem.engine.process.process_log import RateLimited
from tandem.kv_connector.tiers.disk_file import DiskFile
from tandem.kv_connector.tiers.host_blocks import HostBlocks
from tandem.kv_connector.tiers.job_thread import JobThread
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Spill

limited = RateLimited(logging.getLogger(__name__))  # a full disk fails for every block


class DiskTier:
    """The disk tier. Blocks pass through `host`, as they are stored there; `file` is closed by `close`."""

    def __init__(self, host: HostBlocks, file: DiskFile, post: Callable[[JobDone], None]) -> None:
        self._host, self._file = host, file
        self._buffer = torch.frombuffer(file.buffer, dtype=torch.uint8, count=host.raw.shape[1])
        self._thread = JobThread("kv-disk", post)
        self.counters = {"tier_spilled_bytes": 0.0, "tier_fetched_bytes": 0.0}

    def submit(self, job: Spill | Fetch) -> None:
        if isinstance(job, Spill):
            self._thread.submit(job, lambda: self._spill(job))
        else:
            self._thread.submit(job, lambda: self._fetch(job))

    def close(self) -> None:
        if self._thread.stop():
            self._file.close()

    # --- thread ---------------------------------------------------------------------------------------------

    def _spill(self, job: Spill) -> list[bytes]:
        bad = []
        for index, block_hash in enumerate(job.hashes):
            host_slot, slot = job.host_slots[index], job.disk_slots[index]
            self._file.wipe(slot)
            self._buffer.copy_(self._host.raw[host_slot])
            try:
                self._file.write(slot)
            except OSError as error:
                limited.warning("a block is not kept on disk: %s", error)
                bad.append(block_hash)
                continue
            digest = self._digest(host_slot, block_hash)
            parent, tenant, is_whole = job.parents[index], job.tenants[index], job.are_whole[index]
            self._file.describe(slot, block_hash, parent, tenant, digest, is_whole)
            self.counters["tier_spilled_bytes"] += self._file.slot_bytes
        return bad

    def _fetch(self, job: Fetch) -> list[bytes]:
        bad = []
        for block_hash, slot, host_slot in zip(job.hashes, job.disk_slots, job.host_slots, strict=True):
            if not self._fetch_block(block_hash, slot, host_slot):
                self._file.wipe(slot)
                bad.append(block_hash)
        return bad

    def _fetch_block(self, block_hash: bytes, slot: int, host_slot: int) -> bool:
        try:
            self._file.read(slot)
        except OSError as error:
            limited.warning("a block can't be read from disk: %s", error)
            return False
        self._host.raw[host_slot].copy_(self._buffer)
        self.counters["tier_fetched_bytes"] += self._file.slot_bytes
        if self._file.digest(slot, block_hash) == self._digest(host_slot, block_hash):
            return True
        limited.warning("a block on disk is not what was written: it is dropped")
        return False

    def _digest(self, host_slot: int, block_hash: bytes) -> int:
        return self._host.digest(host_slot, self._file.digest_key(block_hash))
