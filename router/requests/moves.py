"""Running samples that are handed to another node, as the router sees it. Pure; docs/migration.md.

A move has two attempts at once: the live one, from which the tokens come, and its successor, whose prompt is what the
client has seen. The successor takes over with its first token, or when the old node says that the sample has left it;
until then the old one counts, and a move that comes to nothing costs nothing. Output indices tell which tokens are
news. A successor that contradicts what the client has seen is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.requests import RequestFailed, TokenDelta
from tandem.router.requests.actions import Action, Moved
from tandem.router.requests.attempts import LiveAttempts
from tandem.router.requests.parts import Attempt, AttemptState, Sample

MOVE_AGAIN_S = 1.0  # pause after a move that came to nothing; a guess


@dataclass(slots=True)
class Move:
    """One sample on its way to another node. Given up at `give_up_at`, in monotonic seconds."""

    source: Attempt
    successor: Attempt  # of one sample
    give_up_at: float


class Moves:
    """The moves of one request's samples. What ends a live attempt tells them so first (`give_up`, `end_finished`)."""

    def __init__(self, samples: Sequence[Sample], attempts: LiveAttempts) -> None:
        self._samples, self._attempts = samples, attempts
        self.under_way: dict[int, Move] = {}  # by sample
        self.not_before = 0.0

    # --- reading ----------------------------------------------------------------------------------------------

    def movable(self, node: NodeKey, now: float) -> list[int]:
        """Samples whose tokens come from this node and that may be moved now."""
        if now < self.not_before:
            return []
        live = self._attempts.live.values()
        running = [a for a in live if a.primary == node and a.state is AttemptState.STREAMING]
        return [
            i
            for attempt in running
            if attempt.primary_streams and not attempt.is_precise
            for i in self._attempts.unfinished(attempt)
            if i not in self.under_way and len(self._samples[i].token_ids) > attempt.num_prior
        ]

    def num_away_from(self, node: NodeKey) -> int:
        return sum(move.source.primary == node for move in self.under_way.values())

    def work_on(self, node: NodeKey) -> set[AttemptKey]:
        """The successors that this node was given."""
        return {move.successor.key for move in self.under_way.values() if move.successor.primary == node}

    # --- changes ----------------------------------------------------------------------------------------------

    def begin(self, sample_index: int, source: NodeKey, target: NodeKey, now: float, within_s: float) -> Move:
        """Gives a sample out of `movable(source)` a successor at `target`."""
        old = self._attempts.of_sample(sample_index)
        assert old.primary == source
        assert sample_index not in self.under_way
        name = old.request_id if len(old.sample_indices) == 1 else self._attempts.own_name(sample_index)
        number = self._attempts.next_number(name, old)
        new = Attempt(name, number, (sample_index,), now, num_failures=old.num_failures, avoid=set(old.avoid))
        new.enter(AttemptState.PLACED, now)
        new.primary, new.num_prior = target, len(self._samples[sample_index].token_ids)
        move = self.under_way[sample_index] = Move(old, new, now + within_s)
        return move

    def arrived(self, node: NodeKey, delta: TokenDelta, now: float) -> tuple[Attempt | None, list[Action]]:
        """The attempt of a delta, if it is a successor's, which takes over unless tokens before it are missing; and the
        actions of that."""
        move = self.under_way.get(delta.sample_index)
        if move is None or not _is_of(move.successor, node, delta):
            return None, []
        if delta.output_index > len(self._samples[delta.sample_index].token_ids):
            return move.successor, []
        return move.successor, self.take_over(delta.sample_index, now)

    def take_over(self, sample_index: int, now: float) -> list[Action]:
        """Makes the successor the sample's live attempt."""
        move = self.under_way.pop(sample_index)
        old, new = move.source, move.successor
        old.sample_indices = tuple(i for i in old.sample_indices if i != sample_index)
        if self._attempts.unfinished(old):
            actions = self._attempts.cancel(old, old.nodes, (sample_index,))
        else:
            actions = self._attempts.cancel(old, old.nodes)
            del self._attempts.live[old.request_id]
        new.enter(AttemptState.STREAMING, now)
        new.primary_streams = True
        self._attempts.live[new.request_id] = new
        return [*actions, Moved(sample_index)]

    def successor_failed(self, node: NodeKey, message: RequestFailed, now: float) -> None:
        """Forgets the move, if the failed attempt is a successor: its sample stays where it is."""
        for i, move in self.under_way.items():
            if _is_of(move.successor, node, message):
                self._forget(i, now)
                return

    def node_lost(self, node: NodeKey, now: float) -> None:
        for i in [i for i, move in self.under_way.items() if move.successor.primary == node]:
            self._forget(i, now)

    def give_up(self, samples: Iterable[int], now: float) -> list[Action]:
        """Ends the moves of these samples by cancelling their successors."""
        return [action for i in samples if i in self.under_way for action in self._cancel(self._forget(i, now))]

    def give_up_overdue(self, now: float) -> list[Action]:
        return self.give_up([i for i, move in self.under_way.items() if now >= move.give_up_at], now)

    def end_finished(self) -> list[Action]:
        """Cancels the successors of samples that have ended."""
        ended = [i for i in self.under_way if self._samples[i].finish_reason is not None]
        return [action for i in ended for action in self._cancel(self.under_way.pop(i).successor)]

    def end_all(self) -> list[Action]:
        """Cancels all successors, since the request is over."""
        successors = [move.successor for move in self.under_way.values()]
        self.under_way.clear()
        return [action for successor in successors for action in self._cancel(successor)]

    def _forget(self, sample_index: int, now: float) -> Attempt:
        """Forgets a move and returns its successor, of which nothing more counts."""
        self._samples[sample_index].pending.clear()  # the old node's tokens come in order
        self.not_before = now + MOVE_AGAIN_S
        return self.under_way.pop(sample_index).successor

    def _cancel(self, successor: Attempt) -> list[Action]:
        return self._attempts.cancel(successor, successor.nodes)

    def check_integrity(self) -> None:
        live = self._attempts.live
        for i, move in self.under_way.items():
            assert live.get(move.source.request_id) is move.source, "a move of no live attempt"
            assert i in self._attempts.unfinished(move.source), "a move of a sample that has ended or is elsewhere"
            assert move.successor not in live.values()


def _is_of(attempt: Attempt, node: NodeKey, message: RequestFailed | TokenDelta) -> bool:
    return attempt.primary == node and attempt.key == message.key
