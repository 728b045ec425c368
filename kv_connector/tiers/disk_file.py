"""KV blocks in a file of slots, with a file of records beside it that finds them again after a restart.

`blocks-N.kv` holds slots, each a whole number of pages, read and written past the page cache (O_DIRECT) where the file
system can. `blocks-N.index` begins with a page that says what the blocks depend on; then one record for each slot. N is
the first number whose index no process has locked. A record is wiped before its slot is written and set after, and its
digest is keyed by identity and hash: whatever is torn, stale, foreign or damaged is noticed when it is read. Nothing is
synced: a crash of the machine loses only copies.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import mmap
import os
import zlib
from pathlib import Path

import numpy as np

from tandem.engine.contracts.errors import ConfigError
from tandem.kv_connector.tiers.index import StoredBlock

logger = logging.getLogger(__name__)
PAGE = 4096  # bytes, in which direct reads and writes of disks go
MAGIC = b"tandem kv tier 2"
MAX_FILES = 64  # nodes that share a folder; a guess
RECORD = np.dtype(
    [
        ("hash", "V16"),
        ("parent", "V16"),
        ("tenant", "V16"),
        ("digest", "<i8"),
        ("sequence", "<u8"),  # in the order of writing
        ("flags", "<u4"),  # HAS_PARENT, HAS_TENANT, HAS_WINDOWS
        ("crc", "<u4"),  # of all before; of a wiped record it is wrong
    ]
)
HAS_PARENT, HAS_TENANT, HAS_WINDOWS = 1, 2, 4
NOTHING = b"\0" * 16


class DiskFile:
    """A file of slots of `block_bytes` bytes. `identity` is a digest (32 bytes) of all that the content depends on. For
    one thread at a time."""

    def __init__(self, folder: Path, capacity_bytes: int, block_bytes: int, identity: bytes) -> None:
        """Raises ConfigError when the folder can't be used."""
        assert len(identity) == 32
        self.slot_bytes = -(-block_bytes // PAGE) * PAGE
        self.num_slots = capacity_bytes // (self.slot_bytes + RECORD.itemsize)
        self._identity = identity
        self._sequence = 0
        self.buffer = mmap.mmap(-1, self.slot_bytes)  # page-aligned, as O_DIRECT wants it
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._index, number = _lock_first(folder)
            self._records = self._open_index(folder / f"blocks-{number}.index")
            self._data = self._open_data(folder / f"blocks-{number}.kv")
        except OSError as error:
            raise ConfigError(f"--disk-tier-dir {folder} can't be used: {error}") from error

    def _open_index(self, path: Path) -> np.memmap:
        header = MAGIC + self._identity + self.slot_bytes.to_bytes(8, "little")
        nbytes = PAGE + self.num_slots * RECORD.itemsize
        if os.pread(self._index, len(header), 0) != header:
            os.ftruncate(self._index, 0)
            os.ftruncate(self._index, nbytes)
            os.pwrite(self._index, header, 0)
        os.ftruncate(self._index, nbytes)
        return np.memmap(path, RECORD, "r+", PAGE, (self.num_slots,))  # by path: a mapping would keep the lock

    def _open_data(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        for extra in (getattr(os, "O_DIRECT", 0), 0):
            try:
                data = os.open(path, flags | extra, 0o600)
            except OSError as error:
                if error.errno != errno.EINVAL or not extra:
                    raise
                continue
            try:
                os.ftruncate(data, self.num_slots * self.slot_bytes)
                os.preadv(data, [memoryview(self.buffer)[:PAGE]], 0)
            except OSError as error:
                os.close(data)
                if error.errno != errno.EINVAL or not extra:
                    raise
                continue
            self.is_direct = bool(extra)
            if not extra:
                logger.warning("%s does not do O_DIRECT: the disk tier goes through the page cache", path.parent)
            return data
        raise AssertionError("without O_DIRECT it opens or raises")

    # --- records --------------------------------------------------------------------------------------------

    def restored(self) -> list[StoredBlock]:
        """The blocks that the records name, in the order of writing. Of a block written twice the newer one counts."""
        records = np.array(self._records)
        ok = [zlib.crc32(each.tobytes()[:-4]) == each["crc"] for each in records]
        newest: dict[bytes, StoredBlock] = {}
        slots = np.flatnonzero(ok)
        for slot in slots[np.argsort(records["sequence"][slots], kind="stable")]:
            record = records[slot]
            flags, block_hash = int(record["flags"]), record["hash"].tobytes()
            parent = record["parent"].tobytes() if flags & HAS_PARENT else None
            tenant = record["tenant"].tobytes() if flags & HAS_TENANT else b""
            newest.pop(block_hash, None)
            newest[block_hash] = StoredBlock(int(slot), block_hash, parent, tenant, bool(flags & HAS_WINDOWS))
            self._sequence = int(record["sequence"])
        return list(newest.values())

    def wipe(self, slot: int) -> None:
        self._records[slot] = np.zeros((), RECORD)

    def describe(
        self, slot: int, block_hash: bytes, parent: bytes | None, tenant: bytes, digest: int, is_whole: bool = True
    ) -> None:
        """Sets the record of a slot that has been written. `tenant` is empty or of 16 bytes. `is_whole`: with the
        block's window blocks."""
        self._sequence += 1
        flags = HAS_PARENT * (parent is not None) + HAS_TENANT * bool(tenant) + HAS_WINDOWS * is_whole
        record = np.zeros((), RECORD)
        for name, value in (("hash", block_hash), ("parent", parent or NOTHING), ("tenant", tenant or NOTHING)):
            record[name] = np.void(value)
        record["digest"], record["sequence"], record["flags"] = digest, self._sequence, flags
        record["crc"] = zlib.crc32(record.tobytes()[:-4])
        self._records[slot] = record

    def digest(self, slot: int, block_hash: bytes) -> int | None:
        """The digest in the slot's record; None if the record does not say that the slot holds this block."""
        record = self._records[slot]
        return int(record["digest"]) if record["hash"].tobytes() == block_hash else None

    def digest_key(self, block_hash: bytes) -> int:
        """The 64-bit key of a block's digest, which so is right for this hash under this identity only."""
        return int.from_bytes(hashlib.sha256(self._identity + block_hash).digest()[:8], "little")

    # --- slots ----------------------------------------------------------------------------------------------

    def write(self, slot: int) -> None:
        """Writes the buffer into the slot. After an OSError the slot's content is undefined."""
        written = os.pwritev(self._data, [self.buffer], slot * self.slot_bytes)
        if written != self.slot_bytes:
            raise OSError(errno.ENOSPC, f"{written} of {self.slot_bytes} bytes were written")

    def read(self, slot: int) -> None:
        """Reads the slot into the buffer."""
        read = os.preadv(self._data, [self.buffer], slot * self.slot_bytes)
        if read != self.slot_bytes:
            raise OSError(errno.EIO, f"{read} of {self.slot_bytes} bytes were read")

    def close(self) -> None:
        self._records.flush()
        os.close(self._data)
        os.close(self._index)


def _lock_first(folder: Path) -> tuple[int, int]:
    """Opens and locks the first free index; returns its descriptor and number. The lock ends with the process."""
    for number in range(MAX_FILES):
        index = os.open(folder / f"blocks-{number}.index", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(index, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(index)
            continue
        return index, number
    raise ConfigError(f"{MAX_FILES} nodes use {folder} already: give this one another --disk-tier-dir")
