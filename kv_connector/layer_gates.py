"""Pulled layers on their way into the pool: which have arrived and are right, for a forward pass that waits for them.

A layer is let through when sums of all its bytes were compared with the holder's: nothing is computed with what was not
checked. When that fails, or lasts too long, all layers are let through and the step is void (RunnerOutput.is_void).
Three threads meet here: the step loop expects and ends, the transfer thread checks, whoever executes the step waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np
import torch

from tandem.engine.messages import KVGrant, KVLayers
from tandem.kernels.digest import BlockSums
from tandem.kernels.push_blocks import list_rows
from tandem.kv_connector.meta import digest_key

LONGEST_WAIT_S = 0.5  # of a step, from its begin: nothing else is computed meanwhile
# Of devices: on H200s prompts came later so than after the whole pull. To launch layers and to check parts takes the
# host, and whole blocks come twice as fast.
PAYS_ON = ("cpu",)


class Arrivals:
    """Of one grant."""

    def __init__(self, grant: KVGrant) -> None:
        self.grant = grant
        self.has_failed = False
        self.num_layers = 0  # that may be read
        self.arrived_at = 0.0  # when the last of them was found right
        self._changed = threading.Condition()
        self._sums: BlockSums | None = None  # of these layers; the transfer thread's

    def check(self, pool_NHLPBD: torch.Tensor, layers: KVLayers) -> None:
        """On the transfer thread; on CUDA on its current stream. Repeated and older words are not heard."""
        grant, blocks = self.grant, self.grant.block_ids
        if layers.grant_signature != grant.signature or not self.num_layers < layers.num_layers <= pool_NHLPBD.shape[2]:
            return
        if self._sums is None:
            key = digest_key(grant.request_id, grant.attempt, grant.grant_id)
            self._sums = BlockSums.of_none(pool_NHLPBD, len(blocks), key)
        listed = list_rows(blocks, pool_NHLPBD.shape[4], pool_NHLPBD.device)
        self._sums.add_layers(pool_NHLPBD, listed, range(self.num_layers, layers.num_layers))
        found = self._sums.on_host().sums_N.numpy()
        expected = np.frombuffer(layers.sums, dtype="<i8")
        if len(expected) == len(found) and (expected == found).all():
            if layers.num_layers == pool_NHLPBD.shape[2]:
                self.arrived_at = time.monotonic()
            self.let_through(layers.num_layers)
        else:
            self.fail()

    def let_through(self, num_layers: int) -> None:
        with self._changed:
            self.num_layers = max(self.num_layers, num_layers)
            self._changed.notify_all()

    def fail(self) -> None:
        with self._changed:
            self.has_failed = True
            self._changed.notify_all()

    def wait_for(self, layer: int, deadline: float) -> None:
        """Until `layer` may be read, or the step is void anyway."""
        with self._changed:
            there = self._changed.wait_for(
                lambda: self.has_failed or layer < self.num_layers, max(0.0, deadline - time.monotonic())
            )
            self.has_failed |= not there


class LayerGates:
    """All grants of pulls by layers; `num_layers` of the pool."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._arrivals: dict[int, Arrivals] = {}

    def expect(self, grant: KVGrant) -> None:
        self._arrivals[grant.grant_id] = Arrivals(grant)

    def end(self, grant_id: int, arrived: bool) -> None:
        """All of it is here and right, or no more of it will come. Idempotent."""
        arrivals = self._arrivals.pop(grant_id, None)
        if arrivals is not None and arrived:
            arrivals.let_through(self._num_layers)
        elif arrivals is not None:
            arrivals.fail()

    def of(self, grant_id: int) -> Arrivals | None:
        return self._arrivals.get(grant_id)

    def has_begun(self, grant_id: int) -> bool:
        """Whether some layers may be read."""
        arrivals = self._arrivals.get(grant_id)
        return arrivals is not None and arrivals.num_layers > 0 and not arrivals.has_failed

    def load_of(self, grant_id: int) -> PulledLayers:
        """For a step that is about to be launched, before the grant has ended."""
        return PulledLayers(self._arrivals[grant_id], self._num_layers)


class PulledLayers:
    """What comes under one step, as worker.LayerLoad has it."""

    def __init__(self, arrivals: Arrivals, num_layers: int) -> None:
        self._arrivals, self._num_layers = arrivals, num_layers

    def start(self, pool: torch.Tensor) -> Mapping[int, Gate]:
        deadline = time.monotonic() + LONGEST_WAIT_S
        return {layer: Gate(self._arrivals, layer, deadline) for layer in range(self._num_layers)}

    @property
    def has_failed(self) -> bool:
        return self._arrivals.has_failed

    @property
    def arrived_at(self) -> float:
        return self._arrivals.arrived_at


class Gate:
    """Before one layer. Holds up the thread that launches it: the wait is short, and no stream hangs on a peer."""

    def __init__(self, arrivals: Arrivals, layer: int, deadline: float) -> None:
        self._arrivals, self._layer, self._deadline = arrivals, layer, deadline

    def wait(self) -> None:
        self._arrivals.wait_for(self._layer, self._deadline)
