"""Running samples that are handed to another node, as the router sees it. Part of RequestMachine; docs/handoff.md.

A move has two attempts at once: the live one, from which the tokens come, and its successor, whose prompt is what the
client has seen. The successor takes over with its first token, or when the old node says that the sample has left it;
until then the old one counts, and a move that comes to nothing costs nothing. Output indices tell which tokens are
news. A successor that contradicts what the client has seen is given up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from tandem.engine.contracts.errors import NodeFailedError, TandemError
from tandem.engine.contracts.wire.parts import PeerRef
from tandem.engine.contracts.wire.requests import Migrate, Migrated, TokenDelta
from tandem.router.placing.view import NodeKey, node_key
from tandem.router.requests.actions import Action, Moved, Send
from tandem.router.requests.core import RequestCore
from tandem.router.requests.parts import Attempt, AttemptState, Sample

MOVE_AGAIN_S = 1.0  # after a move that came to nothing


@dataclass(slots=True)
class Move:
    source: Attempt
    successor: Attempt  # of one sample
    give_up_at: float


@dataclass
class RequestMoves(RequestCore):
    moves: dict[int, Move] = field(default_factory=dict)  # by sample
    move_not_before: float = 0.0

    # --- asked for from outside -----------------------------------------------------------------------------

    def movable(self, node: NodeKey, now: float) -> list[int]:
        """Samples whose tokens come from this node and that may be moved now."""
        if self.outcome is not None or now < self.move_not_before:
            return []
        running = [a for a in self.live.values() if a.primary == node and a.state is AttemptState.STREAMING]
        return [
            i
            for attempt in running
            if attempt.handed_off
            for i in self._unfinished(attempt)
            if i not in self.moves and len(self.samples[i].token_ids) > attempt.num_prior
        ]

    def num_tokens_of(self, sample_index: int) -> int:
        return len(self.spec.prompt_token_ids) + len(self.samples[sample_index].token_ids)

    def move(self, sample_index: int, source: PeerRef, target: PeerRef, now: float, within_s: float) -> list[Action]:
        """A sample out of `movable(source)` goes to `target`, if that succeeds."""
        old = next(a for a in self.live.values() if sample_index in a.sample_indices)
        assert old.primary == node_key(source)
        assert sample_index not in self.moves
        name = old.request_id if len(old.sample_indices) == 1 else f"{self.spec.request_id}-s{sample_index}"
        new = Attempt(name, self._next_number(name, old), (sample_index,), now, avoid=set(old.avoid))
        new.enter(AttemptState.PLACED, now)
        new.primary, new.num_prior = node_key(target), len(self.samples[sample_index].token_ids)
        new.num_failures = old.num_failures
        self.moves[sample_index] = Move(old, new, now + within_s)
        submit = msgspec.structs.replace(self._submit(new, now), mode="decode", peer=source, is_running=True)
        order = Migrate(
            request_id=old.request_id,
            attempt=old.number,
            sample_index=sample_index,
            peer=target,
            successor=(new.request_id, new.number),
            num_tokens=self.num_tokens_of(sample_index),
            deadline_s=within_s / 2,  # the old node ends it by itself before this router does
        )
        return [Send(new.primary, submit), Send(old.primary, order)]

    def migrated(self, node: NodeKey, message: Migrated, now: float) -> list[Action]:
        """The old node's word on how it ended there."""
        move = self.moves.get(message.sample_index)
        if move is None or (move.successor.request_id, move.successor.number) != message.successor:
            return [] if message.reason else self._left_for_nowhere(node, message, now)
        if node != move.source.primary:
            return []
        if message.reason:
            return self._drop_move(message.sample_index, now)
        return self._take_over(message.sample_index, now)

    # --- inside ---------------------------------------------------------------------------------------------

    def _arrived(self, node: NodeKey, delta: TokenDelta, now: float) -> tuple[Attempt | None, list[Action]]:
        """The attempt that a delta is of, if it is a successor's: it takes over, unless tokens before are missing."""
        move = self.moves.get(delta.sample_index)
        if move is None or not self._is_of(move.successor, node, delta.request_id, delta.attempt):
            return None, []
        if delta.output_index > len(self.samples[delta.sample_index].token_ids):
            return move.successor, []
        return move.successor, self._take_over(delta.sample_index, now)

    def _take_over(self, sample_index: int, now: float) -> list[Action]:
        move = self.moves.pop(sample_index)
        old, new = move.source, move.successor
        old.sample_indices = tuple(i for i in old.sample_indices if i != sample_index)
        if self._unfinished(old):
            actions = self._cancel(old, old.nodes, (sample_index,))
        else:
            actions = self._cancel(old, old.nodes, ())
            del self.live[old.request_id]
        new.enter(AttemptState.STREAMING, now)
        new.handed_off = True
        self.live[new.request_id] = new
        return [*actions, Moved(sample_index)]

    def _left_for_nowhere(self, node: NodeKey, message: Migrated, now: float) -> list[Action]:
        """It left its node after its successor had been given up: nobody makes its tokens."""
        attempt = self._current(node, message.request_id, message.attempt)
        if attempt is None or message.sample_index not in self._unfinished(attempt):
            return []
        error = NodeFailedError("a running request was lost between two nodes", request_id=self.spec.request_id)
        return self._attempt_failed(attempt, (), set(), error, True, now)

    def _successor_failed(self, node: NodeKey, request_id: str, number: int, now: float) -> bool:
        """Whether what failed is a successor: then its sample stays where it is."""
        for i, move in self.moves.items():
            if self._is_of(move.successor, node, request_id, number):
                self._drop_move(i, now, is_clean=True)
                return True
        return False

    def _successors_lost(self, node: NodeKey, now: float) -> None:
        for i in [i for i, move in self.moves.items() if move.successor.primary == node]:
            self._drop_move(i, now, is_clean=True)

    def _overdue_moves(self, now: float) -> list[Action]:
        overdue = [i for i, move in self.moves.items() if now >= move.give_up_at]
        return [action for i in overdue for action in self._drop_move(i, now)]

    def _drop_move(self, sample_index: int, now: float, is_clean: bool = False) -> list[Action]:
        move = self.moves.pop(sample_index)
        self.samples[sample_index].pending.clear()  # the old node's tokens come in order
        self.move_not_before = now + MOVE_AGAIN_S
        return [] if is_clean else self._cancel(move.successor, move.successor.nodes, ())

    def _drop_moves(self, samples: Iterable[int], now: float) -> list[Action]:
        return [action for i in samples if i in self.moves for action in self._drop_move(i, now)]

    @staticmethod
    def _is_of(attempt: Attempt, node: NodeKey, request_id: str, number: int) -> bool:
        return (attempt.primary, attempt.request_id, attempt.number) == (node, request_id, number)

    # --- what ends attempts ends their moves ----------------------------------------------------------------

    def _retire(self, attempt: Attempt) -> list[Action]:
        ended = [i for i in self.moves if self.samples[i].finish_reason is not None]
        return self._drop_moves(ended, 0.0) + super()._retire(attempt)

    def _attempt_failed(
        self,
        attempt: Attempt,
        culprits: Iterable[NodeKey],
        already_clean: set[NodeKey],
        error: TandemError,
        retryable: bool,
        now: float,
    ) -> list[Action]:
        actions = self._drop_moves(attempt.sample_indices, now)
        return actions + super()._attempt_failed(attempt, culprits, already_clean, error, retryable, now)

    def _fail(self, error: TandemError) -> list[Action]:
        return self._drop_moves(list(self.moves), 0.0) + super()._fail(error)

    def work_on(self, node: NodeKey) -> set[tuple[str, int]]:
        moving = [move.successor for move in self.moves.values() if move.successor.primary == node]
        return super().work_on(node) | {(attempt.request_id, attempt.number) for attempt in moving}

    def check_integrity(self) -> None:
        super().check_integrity()
        for i, move in self.moves.items():
            assert self.live.get(move.source.request_id) is move.source, "a move of no live attempt"
            assert i in self._unfinished(move.source), "a move of a sample that has ended or is elsewhere"
            assert move.successor not in self.live.values()


def contradicts(sample: Sample, delta: TokenDelta) -> bool:
    """Whether `delta` repeats tokens that were emitted, and not the same."""
    known = sample.token_ids[delta.output_index : delta.output_index + len(delta.token_ids)]
    return tuple(known) != delta.token_ids[: len(known)]
