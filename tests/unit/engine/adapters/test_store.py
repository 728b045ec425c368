"""Adapters in host memory: held as long as anybody needs them, and read again when nobody did for long."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.adapters.store import AdapterStore
from tandem.engine.contracts.wire.adapters import MOST_TOLD, HeldAdapters
from tandem.engine.contracts.wire.parts import MARK_BYTES, AdapterRef


def ref(name: str) -> AdapterRef:
    return AdapterRef(name, name.encode())


def make_store(num_kept: int) -> tuple[AdapterStore, list[str]]:
    read: list[str] = []

    def load(path: str, digest: bytes) -> HostAdapter:
        read.append(path)
        return HostAdapter(Path(path).name.encode(), torch.zeros(100), torch.zeros(1, 3, dtype=torch.int32))

    return AdapterStore(load, num_kept * 412), read


def test_the_latest_used_are_kept() -> None:
    store, read = make_store(2)
    for name in ("a", "b", "a", "c", "a", "b"):
        store.get(ref(name))
    assert read == ["a", "b", "c", "b"]
    assert store.counters()["adapter_host_bytes"] == 2 * 412


def test_what_is_in_use_is_found_beyond_the_limit() -> None:
    store, read = make_store(0)
    a = store.get(ref("a"))
    store.get(ref("b"))
    assert store.get(ref("a")) is a
    del a
    store.get(ref("b"))
    gc.collect()
    store.get(ref("a"))
    assert read == ["a", "b", "b", "a"]


def test_routers_are_told_of_the_latest() -> None:
    store, _ = make_store(MOST_TOLD + 10)
    assert store.held() == HeldAdapters()
    for index in range(MOST_TOLD + 5):
        store.get(ref(f"{index:012}"))
    marks = store.held().marks
    assert len(marks) == MARK_BYTES * MOST_TOLD
    assert marks.startswith(ref(f"{MOST_TOLD + 4:012}").mark)
    assert store.held().read_s > 0


def test_one_content_is_held_once_wherever_it_was_read() -> None:
    store, read = make_store(4)
    assert store.read("one/a") is store.read("other/a")
    assert read == ["one/a", "other/a"]
