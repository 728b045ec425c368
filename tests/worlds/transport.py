"""Bytes between nodes: jobs of transfer threads, writes on their way, gates, fences. A part of a state of the world."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tandem.engine.contracts.keys import AttemptKey, NodeKey
from tandem.engine.contracts.wire.handoff import KVGrant, KVReady
from tandem.kv_connector.protocol.jobs import (
    Finalize,
    Flush,
    Flushed,
    PushFailed,
    ReadySent,
    Retire,
    Retired,
    Verified,
    Verify,
)
from tests.worlds.node import Look
from tests.worlds.setting import Setting, ViolationError

NUM_PARTS = 8
Owner = tuple[str, AttemptKey]  # a node and a hand-off


@dataclass
class Transport:
    """`grants`: all that were ever seen, by number."""

    grants: dict[int, KVGrant]
    jobs: dict[Owner, tuple] = field(default_factory=dict)  # of its transfer thread, in order
    writes: set[tuple[int, int, AttemptKey]] = field(default_factory=set)  # (grant, index into its blocks, hand-off)
    contents: dict[tuple[int, int], str] = field(
        default_factory=dict
    )  # by grant_id and index: good, bad; none: unwritten
    gates: frozenset[int] = frozenset()  # grants whose writes the receiver lets in
    failed: frozenset[Owner] = frozenset()  # the transfer thread skips what follows
    refused: frozenset[Owner] = frozenset()  # the sink's end of the channel turned a write away
    lost: frozenset[tuple[str, NodeKey]] = frozenset()  # (sink, source), until it is admitted again
    fences: tuple[tuple[str, NodeKey, frozenset[int]], ...] = ()  # the same, and the grants that were open then

    def freeze(self) -> tuple:
        return (
            frozenset(self.jobs.items()), frozenset(self.writes), frozenset(self.contents.items()), self.gates,
            self.failed, self.refused, self.lost, self.fences,
        )  # fmt: skip

    @staticmethod
    def thaw(grants: dict[int, KVGrant], jobs: Any, writes: Any, contents: Any, *rest: Any) -> Transport:
        return Transport(grants, dict(jobs), set(writes), dict(contents), *rest)

    # --- reading --------------------------------------------------------------------------------------------

    def can_run(self, owner: Owner, one_sided: bool) -> bool:
        """Finalize, Flush and Retire wait for the writes of their grant, unless the channel is broken."""
        job = self.jobs[owner][0]
        if isinstance(job, Push | Verify | ReadySent) or (owner in self.failed and not one_sided):
            return True
        return not any(self.grants[grant].grant_id == job.grant_id for grant, _, _ in self.writes)

    def can_fail(self, owner: Owner, one_sided: bool) -> bool:
        """On a one-sided transport a failed write has stopped storing before its failure is known."""
        job = self.jobs[owner][0]
        if not isinstance(job, Push | Finalize) or owner in self.failed:
            return False
        return not (one_sided and any(self.grants[grant].grant_id == job.grant_id for grant, _, _ in self.writes))

    def _is_of(self, grant: int, source: NodeKey) -> bool:
        return self.grants[grant].source == source

    # --- jobs -----------------------------------------------------------------------------------------------

    def add(self, owner: Owner, job: Any) -> None:
        """A grant's end drops what is queued of it at once; the word that KVReady was sent is on its way."""
        queued = self.jobs.get(owner, ())
        if isinstance(job, Retire):
            queued = tuple(each for each in queued if isinstance(each, ReadySent | Verify))
        self.jobs[owner] = (*queued, job)

    def take(self, owner: Owner) -> Any:
        first, *rest = self.jobs[owner]
        if rest:
            self.jobs[owner] = tuple(rest)
        else:
            del self.jobs[owner]
        return first

    def run(self, owner: Owner, can_write: bool) -> tuple[Any, KVReady | None]:
        """The transfer thread takes its next job of this hand-off: (event for its node, message to the sink)."""
        job = self.take(owner)
        if isinstance(job, Verify):
            return self._verify(job), None
        if isinstance(job, ReadySent):
            return job, None
        if isinstance(job, Retire):
            return Retired(job.key, job.grant_id), None
        if owner in self.failed:
            return None, None
        if not can_write:
            return self.fail(owner, job.grant_id), None
        if isinstance(job, Push):
            self.writes |= {(job.grant, index, owner[1]) for index in job.indices}
            return None, None
        if isinstance(job, Flush):
            return Flushed(job.key, job.grant_id), None
        ready = _ready(job)
        self.jobs[owner] = (ReadySent(job.key, job.grant_id, ready), *self.jobs.get(owner, ()))
        return None, ready

    def fail(self, owner: Owner, grant_id: int) -> PushFailed:
        self.failed |= {owner}
        self.jobs[owner] = tuple(each for each in self.jobs.get(owner, ()) if isinstance(each, ReadySent | Retire))
        if not self.jobs[owner]:
            del self.jobs[owner]
        return PushFailed(owner[1], grant_id, "broken")

    def _verify(self, job: Verify) -> Verified:
        bad = tuple(i for i in range(len(job.block_ids)) if self.contents.get((job.grant_id, i)) != "good")
        return Verified(job.key, job.grant_id, job.round, bad)

    # --- writes ---------------------------------------------------------------------------------------------

    def land(self, write: tuple[int, int, AttemptKey], content: str, setting: Setting, sink: Look | None) -> None:
        """`sink`: the life that granted; None: its memory is gone with it."""
        self.writes.discard(write)
        number, index, key = write
        grant = self.grants[number]
        if sink is None:
            return
        if not setting.one_sided and not self.lets_in(grant.grant_id):
            self.refused |= {(grant.source_id, key)}
            return
        grant_id, num_blocks = sink.granted.get(key, (0, 0))
        if grant_id != grant.grant_id or index >= num_blocks:
            raise ViolationError(f"a write of {key} lands in a block that may be free or another's")
        self.contents[grant_id, index] = content

    def lets_in(self, grant_id: int) -> bool:
        return grant_id in self.gates

    def forget_contents(self, grant_ids: set[int]) -> None:
        self.contents = {
            (grant_id, i): each for (grant_id, i), each in self.contents.items() if grant_id not in grant_ids
        }

    def forget_failures(self, source: str, under_way: Collection[AttemptKey]) -> None:
        if self.failed or self.refused:
            self.failed = frozenset(each for each in self.failed if each[0] != source or each[1] in under_way)
            self.refused = frozenset(each for each in self.refused if each[0] != source or each[1] in under_way)

    def forget(self, name: str) -> None:
        """What ends with a node's life, but for its writes."""
        mine = {each.grant_id for each in self.grants.values() if each.sink_id == name}
        self.jobs = {owner: jobs for owner, jobs in self.jobs.items() if owner[0] != name}
        self.failed = frozenset(owner for owner in self.failed if owner[0] != name)
        self.refused = frozenset(owner for owner in self.refused if owner[0] != name)
        self.lost = frozenset(each for each in self.lost if each[0] != name)
        self.fences = tuple(each for each in self.fences if each[0] != name)
        self.gates -= mine
        self.forget_contents(mine)

    # --- peers ----------------------------------------------------------------------------------------------

    def fence(self, sink: str, source: NodeKey, has_grants: bool) -> None:
        """Asked for: it is about grants that are open now. That of a node that never grants tells it nothing."""
        self.lost |= {(sink, source)}
        self.fences += ((sink, source, self.gates),) if has_grants else ()

    def end_fence(self, fence: tuple[str, NodeKey, frozenset[int]], setting: Setting) -> None:
        """No write of that source can land any more under these grants: makes that true."""
        sink, source, grants = fence
        at = self.fences.index(fence)
        self.fences = self.fences[:at] + self.fences[at + 1 :]
        ended = {number for number, each in self.grants.items() if each.grant_id in grants}
        ended = {number for number in ended if self._is_of(number, source) and self.grants[number].sink_id == sink}
        self.drop_writes(ended)
        self.gates -= {self.grants[number].grant_id for number in ended}
        if setting.is_revocable:
            self.refused |= {(self.grants[number].source_id, self.grants[number].key) for number in ended}

    def drop_writes(self, grants: set[int]) -> None:
        self.writes = {write for write in self.writes if write[0] not in grants}

    def is_barred(self, sink: str, source: NodeKey) -> bool:
        """Fenced, and not admitted since."""
        where = (sink, source)
        return where in self.lost and all(fence[:2] != where for fence in self.fences)


@dataclass(frozen=True)
class Push:
    """`grant`: its number."""

    grant: int
    grant_id: int
    indices: tuple[int, ...]


def _ready(job: Finalize) -> KVReady:
    grant = job.grant
    return KVReady(
        request_id=grant.request_id, attempt=grant.attempt, grant_id=grant.grant_id, grant_signature=grant.signature,
        source_id=grant.source_id, source_epoch=grant.source_epoch, sink_epoch=grant.sink_epoch,
        first_tokens=job.first_tokens, digests=b"d" * 8 * job.num_pushed_blocks, round=job.round,
        continuation=job.continuation,
    )  # fmt: skip
