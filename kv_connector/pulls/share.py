"""One node's share of a prompt that several nodes compute: which chunks come, which leave, how far it is. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from tandem.engine.contracts.keys import AttemptKey
from tandem.engine.contracts.wire.parts import PeerRef, SharedWork
from tandem.engine.scheduling.request import Request
from tandem.kv_connector.pulls.chunks import ChunkTable


@dataclass(slots=True)
class Coming:
    """A chunk that a peer computes, and writes into blocks of this node's request."""

    key: AttemptKey  # of its hand-off
    has_begun: bool = False  # the first of its layers are here
    is_read: bool = False  # a launched step computes behind it
    is_verified: bool = False


@dataclass(slots=True)
class Leaving:
    """A chunk that is computed here, on its way to one peer."""

    index: int
    is_told: bool = False  # the hand-off knows that all of it is computed


@dataclass(eq=False, slots=True)
class Share:
    """The share of the node at `place`. `position`: all tokens before it are computed by launched steps, or come into
    this node's blocks. The time is monotonic seconds."""

    name: str  # the same on all its nodes
    attempt: int
    place: int
    table: ChunkTable
    nodes: tuple[PeerRef, ...]  # by place
    request: Request
    block_ids: tuple[int, ...]  # of the request
    block_size: int
    deadline: float
    position: int
    coming: dict[int, Coming] = field(default_factory=dict)  # by chunk
    leaving: dict[AttemptKey, Leaving] = field(default_factory=dict)  # those that have not ended
    last_steps: dict[int, int] = field(default_factory=dict)  # by chunk of its own: the newest step that computes it
    asked_at: dict[int, float] = field(default_factory=dict)  # by place: when a helper was asked last
    unclaimed: set[AttemptKey] = field(default_factory=set)  # of `coming`, before that
    is_engaged: bool = False  # all helpers have agreed: blocks are granted
    is_gone: bool = False  # its request has ended

    def key(self, index: int, sink_place: int) -> AttemptKey:
        """The name of a chunk's hand-off to the node at `sink_place`."""
        return AttemptKey(f"{self.name}/{index}/{sink_place}", self.attempt)

    def blocks_of(self, index: int) -> list[int]:
        """The blocks of a chunk, which but for the prompt's last one is whole blocks."""
        begin, end = self.table.begin(index) // self.block_size, self.table.ends[index] // self.block_size
        return list(self.block_ids[begin:end])

    @property
    def end(self) -> int:
        """Where this place's last chunk ends."""
        return self.table.ends[self.table.of(self.place)[-1]]

    def next_part(self) -> tuple[int, int] | None:
        """(begin, end) of the tokens that are to be computed here next; None: something before them has not begun to
        come. So devices wait only for steps that run already, and never for each other."""
        index, at = self.table.next_of(self.place, self.position), self.table.chunk_at(self.position)
        if not all(self.coming[before].has_begun for before in range(at, index)):
            return None
        return max(self.position, self.table.begin(index)), self.table.ends[index]

    def needs(self, index: int) -> list[Coming]:
        """The chunks that come, before chunk `index`."""
        return [each for before, each in self.coming.items() if before < index]

    @property
    def is_sound(self) -> bool:
        """Whether all that launched steps have read is verified."""
        return all(each.is_verified for each in self.coming.values() if each.is_read)

    @property
    def num_verified_tokens(self) -> int:
        """Tokens before the first chunk that is not verified, as far as launched steps compute this node's own."""
        unverified = (self.table.begin(index) for index, each in self.coming.items() if not each.is_verified)
        return min([self.position, *unverified])

    @property
    def has_come(self) -> bool:
        """Whether everything that comes is here and verified."""
        return all(each.is_verified for each in self.coming.values())

    def work_for(self, place: int) -> SharedWork:
        """What the helper at `place` is asked for."""
        prompt, num_tokens = self.request.prompt, self.table.ends[self.table.of(place)[-1]]
        return SharedWork(
            name=self.name,
            token_ids=prompt.token_ids[:num_tokens].astype("<i4", copy=False).tobytes(),
            ends=self.table.ends,
            nodes=self.nodes,
            place=place,
            salt=prompt.secrecy.salt,
            num_public_tokens=min(prompt.secrecy.num_public_tokens, num_tokens),
            context=prompt.secrecy.context,
            priority=prompt.priority,
            targets=prompt.targets,
            waited_s=prompt.waited_s,
        )


@dataclass
class ShareCounters:
    """What became of prompts that this node had, and others helped with, since it started."""

    begun: int = 0  # all helpers have agreed
    declined: int = 0  # computed alone
    failed: int = 0  # the attempt ended: what a helper had begun did not come
    tokens: int = 0  # that others have computed for this node
