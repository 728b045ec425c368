"""Which of a node's blocks it may leave to a peer that surely keeps them. Pure; docs/kept_once.md.

Each node gives way to those behind it in one order of all nodes, and to nobody else. So whoever is last of a block's
holders leaves it to nobody: however late the others' knowledge is, no two leave a block to each other.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable

from tandem.kv_connector.directory.question import Question

# How long what the directory said counts: nodes ask it once a second. A peer that ages a block out meanwhile had it
# among those that it would reuse next.
LEASE_S = 3.0  # a guess
MOST_PEERS = 8  # to which a node leaves blocks; a guess


class KeptElsewhere:
    """What peers keep, by the directory's last answer. The step loop asks and looks, the directory's thread answers;
    both put immutable things in place of others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.soon, self.colder = Question(), Question()
        self.num_answers = 0
        self._answer: tuple[float, frozenset[bytes], frozenset[bytes]] = (-math.inf, frozenset(), frozenset())

    def __contains__(self, block_hash: bytes) -> bool:
        """Whether a peer keeps the block, perhaps without its window blocks."""
        read_at, held, _ = self._answer
        return block_hash in held and self.clock() - read_at <= LEASE_S

    def is_end(self, block_hash: bytes) -> bool:
        """Whether a peer keeps the block and all that a row behind it sees: a request finds there what ends in it."""
        return block_hash in self._answer[2] and block_hash in self

    @property
    def asked(self) -> tuple[bytes, ...]:
        return (*self.soon.hashes, *self.colder.hashes)

    def ask(self, question: Question) -> None:
        """Names the blocks that this node will give up next."""
        self.soon = question

    def ask_about_colder(self, question: Question) -> None:
        """Names blocks that this node would rather give up than others."""
        self.colder = question

    def answer(self, held: Iterable[bytes], read_at: float, ends: Iterable[bytes] | None = None) -> None:
        """Takes which of them peers to whom this node gives way held at `read_at`, and which were ends there; None: all
        were."""
        known = frozenset(held)
        self._answer = read_at, known, known if ends is None else frozenset(ends)
        self.num_answers += 1


def gives_way(own: str, other: str) -> bool:
    """Whether the node `own` leaves to the node `other` what both hold. A total order of names, mixed, so that nodes of
    one role don't all come before those of another."""
    return _place(own) < _place(other)


def _place(node_id: str) -> tuple[bytes, str]:
    return hashlib.blake2b(node_id.encode(), digest_size=8).digest(), node_id
