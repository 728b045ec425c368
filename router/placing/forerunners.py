"""Which prompts wait, unplaced, for one that begins as they do and is being computed: docs/placement.md. Pure.

Placed at once such a prompt would have what both begin with computed twice. When the other has its first token, the
directory says who holds it, and placing goes by that. Nobody waits much longer than computing the same would take.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from tandem.engine.contracts.keys import NodeKey
from tandem.router.placing.outlook import Outlook

HEARD_S = 0.03  # from a prompt's first token until the directory has told what its node holds by then; a guess
WORTH = 1.25  # times what computing the same would take is waited, so that nobody computes it again; a guess
QUEUE_SHARE = 0.5  # that one waits at most so, of what it may wait for a node; a guess


class _Forerunner(NamedTuple):
    hashes: Sequence[bytes]
    block_size: int
    node: Outlook  # that computes it, or the first of several
    ready_at: float  # when its blocks can be found, as foreseen


class Forerunners:
    """The prompts that one router process has placed and that have no first token yet. Times are seconds of one
    clock."""

    def __init__(self) -> None:
        self._by_first: dict[bytes, dict[Hashable, _Forerunner]] = {}  # by the hash of the first block, and by request
        self._first_of: dict[Hashable, bytes] = {}
        self._settled: deque[tuple[float, Hashable]] = deque()  # from when on it needs no waiting

    def __len__(self) -> int:
        return len(self._first_of)

    def placed(
        self, request: Hashable, hashes: Sequence[bytes], block_size: int, node: Outlook, first_token_at: float
    ) -> None:
        """Notes where a prompt of blocks with these hashes, each of `block_size` tokens, is computed until when."""
        if len(hashes):
            self._first_of[request] = hashes[0]
            forerunner = _Forerunner(hashes, block_size, node, first_token_at + HEARD_S)
            self._by_first.setdefault(hashes[0], {})[request] = forerunner

    def settled(self, request: Hashable, now: float) -> None:
        """Notes that a prompt has its first token, or that its request is over."""
        self._forget(now)
        first = self._first_of.get(request)
        if first is not None:
            self._by_first[first][request] = self._by_first[first][request]._replace(ready_at=now + HEARD_S)
            self._settled.append((now + HEARD_S, request))

    def should_wait(
        self,
        request: Hashable,
        hashes: Sequence[bytes],
        cached: Callable[[], Mapping[NodeKey, int]],
        waited_s: float,
        may_wait_s: float,
        now: float,
    ) -> bool:
        """Whether a prompt that has waited for `waited_s` seconds had better wait on, no longer than `may_wait_s` in
        all. `cached`: finds its leading tokens that nodes hold."""
        self._forget(now)
        others = self._by_first.get(hashes[0]) if waited_s < may_wait_s and len(hashes) else None
        if not others:
            return False
        num_held = max(cached().values(), default=0)
        for other in [other for each, other in others.items() if each != request]:
            num_common = other.block_size * _num_common(hashes, other.hashes, num_held // other.block_size)
            saved_s = other.node.seconds_for(num_held, num_common) if num_common > num_held else 0.0
            if waited_s + max(0.0, other.ready_at - now) < min(WORTH * saved_s, may_wait_s):
                return True
        return False

    def _forget(self, now: float) -> None:
        while self._settled and self._settled[0][0] <= now:
            request = self._settled.popleft()[1]
            first = self._first_of.pop(request, None)
            if first is not None:
                del self._by_first[first][request]
                if not self._by_first[first]:
                    del self._by_first[first]


def _num_common(hashes: Sequence[bytes], others: Sequence[bytes], begin: int) -> int:
    """How many leading blocks are equal, if more than `begin` are, else at most so many. Equal hashes mean that all
    before them are equal, too, so a few are made and looked at."""
    end = min(len(hashes), len(others))
    if begin >= end or hashes[begin] != others[begin]:
        return min(begin, end)
    return bisect_left(range(end), True, begin, key=lambda index: hashes[index] != others[index])
