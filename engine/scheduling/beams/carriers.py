"""The sequences that carry a request's beams: one each, forked where a beam has several successors, ended where none.

All beams of a request go one step at a time: a sequence whose candidates are known waits, with its blocks, until those
of its siblings are, and a step's rows are launched only then. So its rows are never launched ahead of what was read.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem.engine.contracts.wire.parts import Candidates
from tandem.engine.scheduling.beams.search import Beam, BeamSearch
from tandem.engine.scheduling.books import SchedulerState
from tandem.engine.scheduling.request import BeamOutput, BeamsEvent, Request


class BeamCarriers:
    """Moves the beams of all requests of one scheduler on, as candidates come."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def add_committed(
        self, request: Request, block_ids: Sequence[int], candidates: Candidates, num_cached_tokens: int
    ) -> None:
        """Takes over a prompt whose KV is complete in `block_ids`, one reference to each included, and begins the
        search with what may follow it."""
        if self._state.add_computed(request, block_ids, num_cached_tokens):
            self.take(request, candidates)

    def take(self, request: Request, candidates: Candidates, drawn_token_id: int = -1) -> None:
        """Takes what may follow a beam; its sequence's slot on the device has `drawn_token_id` next."""
        request.wait_for_siblings(candidates, drawn_token_id)
        carriers = sorted(self._state.sequences(request.key), key=lambda each: each.beam_index)
        given = [each.candidates for each in carriers if each.candidates is not None]
        if len(given) == len(carriers):
            assert request.beams is not None
            request.beams.advance(given)
            self._carry(request.beams, carriers)

    def _carry(self, search: BeamSearch, carriers: list[Request]) -> None:
        """Gives each beam a sequence, or, after the last step, the best of all to the client."""
        if search.is_over:
            self._state.events.append(BeamsEvent(carriers[0], _outputs(search, carriers[0].sample_indices)))
            for carrier in carriers:
                self._state.finish(carrier)
            return
        heirs = self._heirs(search.beams, carriers)
        for index, beam in enumerate(search.beams):
            if heirs[beam.parent] != index:
                self._fork(carriers[beam.parent], beam, index)
        for parent, carrier in enumerate(carriers):
            if parent in heirs:
                self._go_on(carrier, search.beams[heirs[parent]], heirs[parent])
            else:
                self._state.finish(carrier)

    def _heirs(self, beams: list[Beam], carriers: list[Request]) -> dict[int, int]:
        """The beam that goes on in the sequence of each beam before, by that one's number: the one whose token the
        device has there, or the best."""
        heirs: dict[int, int] = {}
        for index, beam in enumerate(beams):
            if beam.parent not in heirs or beam.token_id == carriers[beam.parent].drawn_token_id:
                heirs[beam.parent] = index
        return heirs

    def _fork(self, parent: Request, beam: Beam, index: int) -> None:
        """Makes a sequence that shares the parent's blocks. Where the parent has none, or none is left for the copy of
        the last one, it computes everything again, but for what is cached by then."""
        child = self._state.make_child(parent, parent.sample_indices)
        is_forked = bool(parent.block_ids) and self._state.kv.fork(parent, child, parent.num_computed_tokens)
        child.begin_behind(parent, beam.token_id, index, parent.num_computed_tokens if is_forked else 0)
        self._state.enqueue(child)

    def _go_on(self, carrier: Request, beam: Beam, index: int) -> None:
        carrier.go_on_with(beam.token_id, index)
        if carrier.block_ids:
            self._state.kv.register_full_blocks(carrier, carrier.last_step)


def _outputs(search: BeamSearch, sample_indices: Sequence[int]) -> tuple[BeamOutput, ...]:
    """Sample i is the hypothesis number i, and empty where there are fewer: a grammar may have so few outputs."""
    found = []
    for index in sample_indices:
        if index >= len(search.hypotheses):
            found.append(BeamOutput(index))
            continue
        beam = search.hypotheses[index].beam
        assert beam.finish_reason is not None
        path = beam.path()
        entries = tuple(each.logprobs for each in path if each.logprobs is not None)
        token_ids = tuple(each.token_id for each in path)
        stop_token_id = beam.token_id if beam.is_stop_token else None
        total = float(beam.sum_logprobs)
        found.append(BeamOutput(index, token_ids, beam.finish_reason, stop_token_id, entries or None, total))
    return tuple(found)
