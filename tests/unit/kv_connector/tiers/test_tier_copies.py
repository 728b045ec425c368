"""The threads behind the tiers: bytes to host memory, to disk and back, and what is not served."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from waiting import PATIENCE_S

from tandem.engine.contracts.errors import ConfigError
from tandem.kv_connector.layouts.layer_groups import layer_groups
from tandem.kv_connector.tiers.disk import DiskTier
from tandem.kv_connector.tiers.disk_file import DiskFile
from tandem.kv_connector.tiers.host import HostTier
from tandem.kv_connector.tiers.host_blocks import ExactBlocks, Fp8Blocks
from tandem.kv_connector.tiers.index import StoredBlock
from tandem.kv_connector.tiers.job_thread import JobThread
from tandem.kv_connector.tiers.jobs import Fetch, JobDone, Load, Save, Spill

IDENTITY = b"i" * 32
A, B, C = (bytes([letter]) * 16 for letter in b"abc")
SHAPE = (2, 10, 2, 8, 16)  # heads, layers, planes, block_size, head_dim


Kind = type[ExactBlocks] | type[Fp8Blocks]


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def pool(request: pytest.FixtureRequest) -> torch.Tensor:
    """Of numbers that e4m3 has."""
    raw = torch.randint(0, 16, (6, *SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    return (raw.to(torch.float32) * torch.tensor([1.0, 8.0]).view(2, 1, 1, 1, 1)).to(request.param)


@pytest.fixture(params=[ExactBlocks, Fp8Blocks])
def kind(request: pytest.FixtureRequest, pool: torch.Tensor) -> Kind:
    if request.param is Fp8Blocks and pool.dtype == torch.float8_e4m3fn:
        pytest.skip("kept as it is")
    return request.param


class Tiers:
    def __init__(self, pool: torch.Tensor, kind: Kind, folder: Path) -> None:
        self.pool, self.done = pool, queue.SimpleQueue[JobDone]()
        self.host = HostTier(pool, kind(pool, 4), self.done.put)
        self.file = DiskFile(folder, 1 << 20, kind.slot_bytes(pool), IDENTITY)
        self.disk = DiskTier(self.host.blocks, self.file, self.done.put)

    def run(self, job: Save | Load | Spill | Fetch) -> tuple[bytes, ...]:
        (self.host if isinstance(job, Save | Load) else self.disk).submit(job)  # type: ignore[arg-type]
        done = self.done.get(timeout=PATIENCE_S)
        assert done.job is job
        assert done.seconds >= 0
        return done.bad

    def block(self, block_id: int) -> torch.Tensor:
        return self.pool[block_id].view(torch.uint8).clone()

    def close(self) -> None:
        self.host.close()
        self.disk.close()


@pytest.fixture
def tiers(pool: torch.Tensor, kind: Kind, tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(pool, kind, tmp_path)
    yield made
    made.close()


def saved(*pairs: tuple[int, int]) -> Save:
    blocks, slots = zip(*pairs, strict=True)
    return Save((A, B)[: len(pairs)], blocks, slots, ((0,),) * len(pairs), 0, ((),) * len(pairs))


def test_to_host_memory_and_back(tiers: Tiers) -> None:
    before = [tiers.block(block_id) for block_id in range(6)]
    assert tiers.run(saved((0, 3), (1, 1))) == ()
    assert tiers.run(Load(1, (A, B), (3, 1), (4, 2), ((), ()))) == ()
    before[4], before[2] = before[0], before[1]
    assert all(torch.equal(tiers.block(block_id), before[block_id]) for block_id in range(6))


def test_beside_a_forward_pass_each_layer_is_there_when_its_event_says_so(tiers: Tiers) -> None:
    tiers.run(saved((0, 3), (1, 1)))
    events = tiers.host.step_load(Load(0, (A, B), (3, 1), (4, 2), ((), ()))).start(tiers.pool)
    assert sorted(events) == list(range(10))
    for layer in range(10):
        events[layer].wait()
        for target, source in ((4, 0), (2, 1)):
            got, wanted = tiers.block(target)[:, layer], tiers.block(source)[:, layer]
            assert torch.equal(got, wanted), f"layer {layer} is late"
    assert tiers.done.get(timeout=PATIENCE_S).bad == ()


def test_layers_go_in_a_few_groups() -> None:
    assert [len(layer_groups(num)) for num in (1, 3, 8, 10, 32, 80)] == [1, 3, 8, 5, 8, 8]
    assert [layer for group in layer_groups(10) for layer in group] == list(range(10))


def test_to_disk_and_back_in_another_process(pool: torch.Tensor, kind: Kind, tmp_path: Path) -> None:
    tiers = Tiers(pool, kind, tmp_path)
    tiers.run(saved((0, 0), (1, 1)))
    spill = Spill((A, B), (None, A), (b"", C), (0, 1), (5, 2), (True, False))
    assert tiers.run(spill) == ()
    tiers.close()
    again = Tiers(torch.zeros_like(tiers.pool), kind, tmp_path)
    assert again.file.restored() == [StoredBlock(5, A, None, b""), StoredBlock(2, B, A, C, is_whole=False)]
    assert again.run(Fetch(1, (A, B), (5, 2), (3, 0))) == ()
    again.run(Load(1, (A, B), (3, 0), (0, 1), ((), ())))
    assert all(torch.equal(again.block(block_id), tiers.block(block_id)) for block_id in (0, 1))
    again.close()


def test_the_file_goes_past_the_page_cache_where_the_file_system_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        can = True
    except OSError:
        can = False
    file = DiskFile(tmp_path, 1 << 16, 5000, IDENTITY)
    assert bool(fcntl.fcntl(file._data, fcntl.F_GETFL) & os.O_DIRECT) == file.is_direct == can
    assert file.slot_bytes == 8192, "whole pages, as direct transfers need"
    file.close()
    monkeypatch.delattr(os, "O_DIRECT")
    file = DiskFile(tmp_path, 1 << 16, 5000, IDENTITY)
    assert not file.is_direct
    assert "page cache" in caplog.text
    file.close()


def test_what_is_damaged_stale_or_of_another_hash_is_not_served(tiers: Tiers, tmp_path: Path) -> None:
    tiers.run(saved((0, 0), (1, 1)))
    tiers.run(Spill((A, B), (None, A), (b"", b""), (0, 1), (5, 2), (True, True)))
    data = os.open(next(tmp_path.glob("*.kv")), os.O_RDWR)
    offset = 5 * tiers.file.slot_bytes + 77
    os.pwrite(data, bytes([os.pread(data, 1, offset)[0] ^ 1]), offset)
    os.close(data)
    assert tiers.run(Fetch(1, (A, B), (5, 2), (2, 3))) == (A,)
    assert tiers.run(Fetch(2, (C,), (2,), (2,))) == (C,), "another block's slot"
    assert tiers.file.restored() == [], "what is bad is not found again"


def test_a_disk_that_fails_keeps_nothing(tiers: Tiers, caplog: pytest.LogCaptureFixture) -> None:
    tiers.run(saved((0, 0)))
    os.ftruncate(tiers.file._data, 0)
    assert tiers.run(Fetch(1, (A,), (5,), (2,))) == (A,)
    read_only = os.open(f"/proc/self/fd/{tiers.file._data}", os.O_RDONLY)
    os.dup2(read_only, tiers.file._data)
    os.close(read_only)
    for _ in range(20):
        assert tiers.run(Spill((A,), (None,), (b"",), (0,), (5,), (True,))) == (A,)
    assert tiers.file.restored() == []
    assert sum("not kept on disk" in message for message in caplog.messages) <= 1, "not a line a block"


def test_files_of_another_identity_are_emptied(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, 1 << 20, 5000, IDENTITY)
    assert file.slot_bytes == 8192
    file.write(3)
    file.describe(3, A, None, b"", -5)
    assert (file.digest(3, A), file.digest(3, B)) == (-5, None)
    file.close()
    for identity, num_found in ((IDENTITY, 1), (b"o" * 32, 0), (IDENTITY, 0)):
        file = DiskFile(tmp_path, 1 << 20, 5000, identity)
        assert len(file.restored()) == num_found
        file.close()


def test_a_smaller_file_keeps_what_still_fits(tmp_path: Path) -> None:
    for nbytes, num_found in ((1 << 20, 0), (50_000, 1), (1 << 20, 1)):
        file = DiskFile(tmp_path, nbytes, 4096, IDENTITY)
        assert len(file.restored()) == num_found
        if nbytes == 1 << 20:
            for slot in (3, 200):
                file.describe(slot, bytes([slot]) * 16, None, b"", 0)
        file.close()


def test_a_folder_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk-tier-dir"):
        DiskFile(tmp_path / "file" / "x", 1 << 20, 4096, IDENTITY)


def test_a_thread_of_jobs_begins_with_what_it_needs() -> None:
    """Such as the device that is current there."""
    done, seen = queue.SimpleQueue[JobDone](), list[str]()
    thread = JobThread("kv-test", done.put, lambda: seen.append(threading.current_thread().name))
    job = Load(1, (), (), (), ())
    thread.submit(job, lambda: seen.append("job"))
    assert done.get(timeout=PATIENCE_S).job is job
    assert seen == ["kv-test", "job"]
    assert thread.stop()
