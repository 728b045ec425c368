"""Deliberate faults on a channel, for tests. `NodeOptions.fault_injection` holds the specification.

A comma-separated list of `fault:argument`; N counts the channel's writes from 1, `*` means every one of them:

    delay:S      sleep S seconds before every write
    drop:N       write N is not done and nobody is told
    duplicate:N  write N is done twice
    corrupt:N    of write N's payload one byte arrives flipped
    die:N        this process kills itself (SIGKILL) when half of write N's blocks are written
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

import torch

from tandem.engine.contracts.errors import ConfigError
from tandem.engine.contracts.wire.handoff import KVGrant
from tandem.kv_connector.transports.base import Write
from tandem.kv_connector.transports.pool_channel import PoolChannel

_NUMBERED = ("drop", "duplicate", "corrupt", "die")


@dataclass(frozen=True)
class FaultPlan:
    """The numbers of the writes that each fault hits; `None` in a set stands for every write."""

    delay_s: float
    numbers: dict[str, frozenset[int | None]]

    def hits(self, fault: str, number: int) -> bool:
        chosen = self.numbers.get(fault, frozenset())
        return None in chosen or number in chosen


def parse_faults(specification: str) -> FaultPlan:
    """Reads a specification. Raises ConfigError that names the part which is not understood."""
    delay_s = 0.0
    numbers: dict[str, set[int | None]] = {}
    for part in filter(None, (each.strip() for each in specification.split(","))):
        fault, _, argument = part.partition(":")
        try:
            if fault == "delay":
                delay_s = float(argument)
            elif fault in _NUMBERED:
                numbers.setdefault(fault, set()).add(None if argument == "*" else int(argument))
            else:
                raise ValueError
        except ValueError:
            raise ConfigError(f"fault {part!r}: expected delay:SECONDS or {'|'.join(_NUMBERED)}:NUMBER_OR_*") from None
    return FaultPlan(delay_s, {fault: frozenset(chosen) for fault, chosen in numbers.items()})


class FaultInjector:
    """A channel that misbehaves as planned. Writes are counted over its life."""

    def __init__(self, channel: PoolChannel, plan: FaultPlan) -> None:
        self._channel = channel
        self._plan = plan
        self._num_writes = 0
        self.peer = channel.peer
        self.max_write_bytes = channel.max_write_bytes
        self.sums_blocks, self.sums_layers = channel.sums_blocks, channel.sums_layers
        self.writes_in_stream = channel.writes_in_stream

    def write(self, write: Write, pool_NHLPBD: torch.Tensor | None = None) -> None:
        self._num_writes += 1
        number = self._num_writes
        time.sleep(self._plan.delay_s)
        if self._plan.hits("drop", number):
            return
        if self._plan.hits("die", number):
            self._channel.write(write.take(range((len(write.pairs) + 1) // 2)), pool_NHLPBD)
            os.kill(os.getpid(), signal.SIGKILL)
        self._channel.write(write, pool_NHLPBD)
        if self._plan.hits("duplicate", number):
            self._channel.write(write._replace(sums=None), pool_NHLPBD)
        if self._plan.hits("corrupt", number) and write.pairs:
            source, destination = write.pairs[0]
            pool = self._channel.source.pool_NHLPBD if pool_NHLPBD is None else pool_NHLPBD
            altered = _with_flipped_byte(pool, source, 0 if write.layers is None else write.layers.start)
            self._channel.write(Write(write.grant, [(0, destination)], write.layers, write.num_valid[:1]), altered)

    def flush(self, grant: KVGrant) -> None:
        self._channel.flush(grant)

    def close(self) -> None:
        self._channel.close()


def _with_flipped_byte(pool_NHLPBD: torch.Tensor, block_id: int, layer: int) -> torch.Tensor:
    """A pool of one block: a copy of `block_id`, changed in the first slot of `layer`."""
    pool = pool_NHLPBD[block_id : block_id + 1].clone()
    pool[0, 0, layer, 0, 0].view(torch.uint8)[0] ^= 0x40
    return pool
