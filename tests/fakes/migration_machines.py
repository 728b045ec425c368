"""The real machines, pickled small: a state of the world (migration_world.py) is a pickle, and there are many."""

from __future__ import annotations

from typing import Any

from tandem.kv_connector.protocol.sink_table import SinkMachine, SinkState
from tandem.kv_connector.protocol.source_table import SourceMachine, SourceState
from tandem.router.requests.machine import RequestMachine

_SOURCE_STATES = {state.value: state for state in SourceState}
_SINK_STATES = {state.value: state for state in SinkState}


def _source_machine(state: str, *numbers: int) -> SmallSourceMachine:
    machine = SmallSourceMachine(numbers[0], numbers[1])
    machine.state, machine.grant_id, machine.round = _SOURCE_STATES[state], numbers[2], numbers[3]
    return machine


def _sink_machine(state: str, *numbers: Any) -> SmallSinkMachine:
    machine = SmallSinkMachine(numbers[0], 1)
    machine.state = _SINK_STATES[state]
    machine.source_epoch, machine.grant_id, machine.round, machine.source_lost, machine.fenced = numbers[1:]
    return machine


class SmallSourceMachine(SourceMachine):
    """Pickled without its table."""

    def key(self) -> tuple:
        return self.state.value, self.source_epoch, self.sink_epoch, self.grant_id, self.round

    def __reduce__(self) -> tuple:
        return _source_machine, self.key()


class SmallSinkMachine(SinkMachine):
    def key(self) -> tuple:
        return (self.state.value, self.sink_epoch, self.source_epoch, self.grant_id, self.round, self.source_lost,
                self.fenced)  # fmt: skip

    def __reduce__(self) -> tuple:
        return _sink_machine, self.key()


class Machine(RequestMachine):
    """Pickled without its specification."""

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "spec"}

    def frozen(self) -> tuple:
        def attempt(a: Any) -> tuple:
            return (a.request_id, a.number, a.sample_indices, a.state.value, a.primary, a.primary_streams, a.num_prior,
                    tuple(sorted(a.avoid)))  # fmt: skip

        samples = tuple((tuple(s.token_ids), tuple(sorted(s.pending)), s.finish_reason) for s in self.samples)
        moves = tuple((i, attempt(m.source), attempt(m.successor)) for i, m in sorted(self.moves.under_way.items()))
        live = tuple(attempt(a) for _, a in sorted(self.attempts.live.items()))
        return (
            type(self.outcome).__name__, samples, live, moves,
            tuple(sorted(self.attempts._numbers.items())), tuple(sorted(self.attempts.pending_cancels)),
        )  # fmt: skip
