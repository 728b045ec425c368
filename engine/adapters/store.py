"""Adapters in host memory: those that requests need, and of the others the latest used, up to a number of bytes."""

from __future__ import annotations

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from itertools import islice

from tandem.engine.adapters.host_adapter import HostAdapter
from tandem.engine.contracts.errors import AdapterError
from tandem.engine.contracts.wire.adapters import MOST_TOLD, HeldAdapters
from tandem.engine.contracts.wire.parts import MARK_BYTES, AdapterRef


class AdapterStore:
    """Adapters by digest, for any thread. One is found while anybody holds it; the store keeps those used last."""

    def __init__(self, load: Callable[[str, bytes], HostAdapter], max_bytes: int) -> None:
        self._load, self._max_bytes = load, max_bytes
        self._lock = threading.Lock()
        self._alive: weakref.WeakValueDictionary[bytes, HostAdapter] = weakref.WeakValueDictionary()
        self._kept: OrderedDict[bytes, HostAdapter] = OrderedDict()
        self._num_bytes = 0
        self._read_s = 0.0  # a moving mean
        self.num_reads = 0

    def find(self, digest: bytes) -> HostAdapter | None:
        with self._lock:
            adapter = self._alive.get(digest)
            if adapter is not None:
                self._keep(adapter)
            return adapter

    def get(self, ref: AdapterRef) -> HostAdapter:
        """The adapter, read from its folder where it isn't in memory. Raises AdapterError."""
        return self.find(ref.digest) or self.read(ref.path, ref.digest)

    def read(self, path: str, digest: bytes = b"") -> HostAdapter:
        """What the folder holds now. Raises AdapterError, also when it isn't what `digest`, if any, says."""
        started = time.monotonic()
        try:
            adapter = self._load(path, digest)
        except MemoryError:
            raise AdapterError(f"there is no host memory for the adapter in {path}") from None
        took_s = time.monotonic() - started
        with self._lock:
            self._read_s = (self._read_s + took_s) / 2 if self._read_s else took_s
        return self.add(adapter)

    def add(self, adapter: HostAdapter) -> HostAdapter:
        """Takes in what was read; returns the one that is held already, if there is one of this digest."""
        with self._lock:
            self.num_reads += 1
            known = self._alive.get(adapter.digest)
            if known is None:
                self._alive[adapter.digest] = known = adapter
            self._keep(known)
            return known

    def _keep(self, adapter: HostAdapter) -> None:
        """Notes a use, and lets go of the adapters unused for longest; the newest stays, however large it is."""
        if adapter.digest not in self._kept:
            self._kept[adapter.digest] = adapter
            self._num_bytes += adapter.num_bytes
        self._kept.move_to_end(adapter.digest)
        while self._num_bytes > self._max_bytes and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.num_bytes

    def held(self) -> HeldAdapters:
        """The adapters in memory, as routers are told of them."""
        with self._lock:
            digests = dict.fromkeys([*reversed(self._kept), *self._alive.keys()])
            return HeldAdapters(b"".join(each[:MARK_BYTES] for each in islice(digests, MOST_TOLD)), self._read_s)

    def counters(self) -> dict[str, float]:
        return {"adapter_host_bytes": float(self._num_bytes), "adapter_reads": float(self.num_reads)}
