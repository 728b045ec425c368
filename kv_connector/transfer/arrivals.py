"""KV that a peer writes into this node's pool while a step that needs it runs: how many layers of it have come.

The thread for messages hears of each layer (KVLayers) and notes it here. On CUDA the note is a number in mapped memory
for which the step's stream waits; on CPU a step computes where it is launched, so it waits there. What doesn't come
lets the step go on, whose row is then spoiled: its request fails before anything of it is told.

While a stream waits, the first launch of a kernel, which is loaded then, holds the driver until the stream goes on, and
with it the thread that pushes KV, for which the peer may wait (docs/measurements.md#what-holds-a-driver). So whoever
may launch something new says so (`settle`), and the host waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence

import torch

from tandem.engine.contracts.keys import NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVLayers, KVReady, KVRelease
from tandem.engine.device.cuda_driver import wait_for_value
from tandem.kv_connector.protocol.jobs import ArrivingKV
from tandem.kv_connector.transfer.layer_order import LayerOrder

MAX_FLAGS = 4096  # steps at a time that may wait; a guess
# Of a host, for one layer, at most: meanwhile the node does nothing else, so it can't even say that something of its
# own has failed, and the one that it waits for may wait for that. A guess.
MOST_HOST_WAIT_S = 10.0
# On a device, of a step for all that it needs: what that waits for has begun, and takes a tenth of a second. A guess,
# below the time after which routers take a node that doesn't answer for lost.
MOST_DEVICE_WAIT_S = 4.0
LET_GO = (1 << 31) - 1  # more layers than there are: whoever waits goes on


class Arriving:
    """One grant: how many of the model's first layers are written. Each step on a device that waits for them has a flag
    (int32 [1], page-locked) that says so: two steps may be launched at a time, and both need what is not verified
    yet."""

    def __init__(self, grant: KVGrant) -> None:
        self.grant = grant
        self.num_layers = 0
        self.is_spoiled = False
        self._waits: dict[int, tuple[float, torch.Tensor | None]] = {}  # by step: deadline, flag

    def await_until(self, step_id: int, deadline: float, flag_1: torch.Tensor | None = None) -> None:
        """Notes that a step waits until `deadline` at most."""
        self._waits[step_id] = deadline, flag_1
        self.note(self.num_layers)

    def has_run(self, step_id: int) -> None:
        """Notes that a step waits no more."""
        self._waits.pop(step_id, None)

    @property
    def deadline(self) -> float:
        """The deadline (monotonic seconds) of the first step that waits; 0.0: none waits."""
        return min((deadline for deadline, _ in self._waits.values()), default=0.0)

    def let_go(self, num_all: int) -> bool:
        """Lets whoever waits go on; returns whether layers were missing."""
        if self.num_layers >= num_all:
            return False
        self.is_spoiled = True
        self.note(LET_GO)
        return True

    def note(self, num_layers: int) -> None:
        self.num_layers = max(self.num_layers, num_layers)
        for _, flag_1 in self._waits.values():
            if flag_1 is not None:
                flag_1[0] = self.num_layers


class LayersWait:
    """A step's wait for the first layers of a grant: they are there when it is over, or will not come."""

    def __init__(
        self, owner: Arrivals, arriving: Arriving, flag_1: torch.Tensor | None, num_layers: int, device: torch.device
    ) -> None:
        self._owner, self._arriving, self._num_layers = owner, arriving, num_layers
        self._flag_1, self._device = flag_1, device

    def on_host(self) -> None:
        self._owner.wait(self._arriving, self._num_layers)

    def on_stream(self) -> None:
        """On CUDA, lets the current stream wait; on CPU, as the host."""
        if self._flag_1 is None:
            self.on_host()
            return
        assert self._device.index is not None, "the pool is on one certain device"
        stream = torch.cuda.current_stream(self._device).cuda_stream
        wait_for_value(self._device.index, stream, self._flag_1.data_ptr(), self._num_layers)


class Arrivals:
    """What is on its way into this pool, whose peers push layers in this order. Thread-safe."""

    def __init__(self, order: LayerOrder, device: torch.device) -> None:
        self._awaited_first, self._num_layers, self._device = order.awaited, order.num_layers, device
        self._changed = threading.Condition()
        self._by_grant: dict[int, Arriving] = {}
        self._awaited: dict[int, list[tuple[int, Arriving]]] = {}  # by step: slots, and what their rows need
        self._flags = torch.zeros(MAX_FLAGS, dtype=torch.int32).pin_memory() if device.type == "cuda" else None
        self._num_flags_used = 0

    # --- what comes -------------------------------------------------------------------------------------------

    def expect(self, grant: KVGrant) -> None:
        """Notes a grant before its source hears of it."""
        with self._changed:
            self._by_grant[grant.grant_id] = Arriving(grant)

    def hear(self, message: KVLayers | KVReady | KVRelease) -> None:
        """Takes a source's word on what it has written, or that no more comes. One that does not know the grant's
        signature is ignored."""
        with self._changed:
            if isinstance(message, KVRelease):
                self._released(message)
                return
            arriving = self._by_grant.get(message.grant_id)
            if arriving is None or message.grant_signature != arriving.grant.signature:
                return
            arriving.note(message.num_layers if isinstance(message, KVLayers) else self._num_layers)
            self._changed.notify_all()

    def end(self, grant_id: int) -> None:
        """Forgets a grant that is over. A step that still waits for layers of it is spoiled, and goes on."""
        with self._changed:
            arriving = self._by_grant.pop(grant_id, None)
            if arriving is not None:
                self._let_go(arriving)

    def source_lost(self, source: NodeKey) -> None:
        """Lets steps go on that wait for what this node writes."""
        with self._changed:
            for arriving in self._by_grant.values():
                if arriving.grant.source == source:
                    self._let_go(arriving)

    def expire(self, now: float) -> None:
        """Lets steps go on whose deadline has passed."""
        with self._changed:
            for arriving in self._by_grant.values():
                if 0 < arriving.deadline <= now:
                    self._let_go(arriving)

    # --- who waits --------------------------------------------------------------------------------------------

    def waits(self, step_id: int, needed: Sequence[ArrivingKV]) -> Mapping[int, list[LayersWait]]:
        """What layers of this step have to wait for, by the index of the first layer that is read then: layers wait in
        the model's order. `spoiled` must be asked when the step has run."""
        waits: dict[int, list[LayersWait]] = {}
        latest = time.monotonic() + MOST_DEVICE_WAIT_S if self._flags is not None else math.inf
        with self._changed:
            for each in needed:
                arriving = self._by_grant.get(each.grant_id)
                if arriving is None:  # it has ended since the step was planned
                    arriving = Arriving(_NO_GRANT)
                    self._let_go(arriving)
                self._awaited.setdefault(step_id, []).append((each.slot, arriving))
                missing = {i: num for i, num in self._awaited_first.items() if num > arriving.num_layers}
                if missing:
                    flag_1 = self._next_flag()
                    arriving.await_until(step_id, min(each.deadline, latest), flag_1)
                    for layer, num_layers in missing.items():
                        wait = LayersWait(self, arriving, flag_1, num_layers, self._device)
                        waits.setdefault(layer, []).append(wait)
        return waits

    @property
    def are_missing(self) -> bool:
        """Whether a step that was launched waits for what has not come."""
        with self._changed:
            return any(each.num_layers < self._num_layers for step in self._awaited.values() for _, each in step)

    def spoiled(self, step_id: int) -> dict[int, str]:
        """The slots whose rows of this step lacked KV, and why."""
        with self._changed:
            awaited = self._awaited.pop(step_id, [])
            for _, arriving in awaited:
                arriving.has_run(step_id)
            return {
                slot: f"{arriving.grant.source_id} did not compute the prompt's beginning to its end"
                for slot, arriving in awaited
                if arriving.is_spoiled
            }

    def settle(self, before: float) -> None:
        """Blocks until no step before this one waits."""
        with self._changed:
            awaited = [each for step_id, step in self._awaited.items() if step_id < before for _, each in step]
        for arriving in awaited:
            self.wait(arriving, self._num_layers)

    def wait(self, arriving: Arriving, num_layers: int) -> None:
        """Blocks until so many layers are there, or will not come."""
        most = time.monotonic() + MOST_HOST_WAIT_S
        with self._changed:
            while arriving.num_layers < num_layers:
                left_s = min(most, arriving.deadline) - time.monotonic()
                if left_s <= 0:
                    self._let_go(arriving)
                else:
                    self._changed.wait(left_s)

    # --- inside -----------------------------------------------------------------------------------------------

    def _released(self, message: KVRelease) -> None:
        for arriving in self._by_grant.values():
            if arriving.grant.key == message.key and arriving.grant.source_epoch == message.source_epoch:
                self._let_go(arriving)

    def _let_go(self, arriving: Arriving) -> None:
        if arriving.let_go(self._num_layers):
            self._changed.notify_all()

    def _next_flag(self) -> torch.Tensor | None:
        """A flag that says 0. Flags are used in turn: the one that comes next is of a step long over."""
        if self._flags is None:
            return None
        index = self._num_flags_used % MAX_FLAGS
        self._num_flags_used += 1
        self._flags[index] = 0
        return self._flags[index : index + 1]


_NO_GRANT = KVGrant(
    request_id="", attempt=0, grant_id=0, source_id="a peer", source_epoch=0, sink_id="", sink_epoch=0,
    first_block=0, block_ids=(), num_prompt_tokens=0, lease_s=0.0,
)  # fmt: skip
