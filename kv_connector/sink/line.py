"""Which claim is granted next, as blocks become free: that of the request that matters most, of equals the first. Who
has waited for AGED_AFTER_S goes before all others, as in the scheduler. Pure."""

from __future__ import annotations

import bisect
import math
import secrets
from typing import TYPE_CHECKING

from tandem.engine.blocks.reservations import Kind
from tandem.engine.contracts.config import NodeOptions
from tandem.engine.contracts.wire.handoff import KVClaim, KVGrant
from tandem.engine.scheduling.prompt_order import AGED_AFTER_S
from tandem.engine.scheduling.request import FIRST_OF_ALL
from tandem.kv_connector.protocol import outcomes
from tandem.kv_connector.protocol.kind import HandoffKind
from tandem.kv_connector.protocol.sink_table import SinkEvent
from tandem.kv_connector.protocol.sink_table import SinkState as S
from tandem.kv_connector.sink.actions import SinkActions
from tandem.kv_connector.sink.ledger import SinkLedger
from tandem.kv_connector.sink.record import ENDED, SinkRecord

if TYPE_CHECKING:
    from tandem.engine.contracts.security import ClusterKeys


# The claim that is first in line leaves blocks held for requests of this node with them for so long; then it takes
# them, since claim and requests may each hold what the other lacks.
PATIENCE_S = 0.3  # a guess


def _place_of(record: SinkRecord) -> tuple[int, int]:
    return record.place


class SinkLine:
    """A claim that does not fit holds the line. Pulls and running sequences come after all others, let each other pass
    and are refused when there is no room: whoever pulls can do without, and what runs elsewhere stays there."""

    def __init__(self, ledger: SinkLedger, actions: SinkActions, keys: ClusterKeys, options: NodeOptions) -> None:
        self._ledger, self._actions, self._keys = ledger, actions, keys
        self._pool = ledger.pool
        self._lease_s = options.timeouts.grant_lease_s
        self._headroom = int(options.scheduler.growth_headroom * ledger.pool.num_blocks)
        self._most_promised = ledger.pool.num_blocks // 2 if options.role == "unified" else math.inf
        self._queue: list[SinkRecord] = []  # by their places
        self._num_claims = 0
        self._pulls: list[SinkRecord] = []  # those that have claimed
        self._short_since = math.inf  # when the first claim was first seen to lack blocks

    def on_claim(self, record: SinkRecord, claim: KVClaim) -> None:
        """Takes a claim in. That of a pull says how much the source has; a repetition must say the same."""
        if record.kind is HandoffKind.PULL and not self._fits_pull(record, claim.num_prompt_tokens, claim.first_kept):
            self._ledger.counters.foreign_messages += 1
            return
        if record.num_claimed == 0:
            record.num_claimed, record.first_kept = claim.num_prompt_tokens, claim.first_kept
            self.take_claimed(record)
        self._actions.run(record, record.machine.on_claim(claim.source_epoch, claim.sink_epoch))

    def take_claimed(self, record: SinkRecord) -> None:
        """Takes from a claim, which may have come before it was expected, the size of what its source alone knows: of a
        pull, and of a running sequence, which may become so long and is no shorter than its prompt. A pull that does
        not fit stays without a size."""
        num_claimed, first_kept, block_size = record.num_claimed, record.first_kept, self._ledger.block_size
        if record.kind is HandoffKind.SEQUENCE and num_claimed and record.request is not None:
            record.num_tokens = max(num_claimed, record.request.num_prompt_tokens)
            record.num_blocks = self._ledger.num_blocks_of(record.num_tokens)
            self._ledger.pass_over(record, first_kept)
        elif record.kind is HandoffKind.PULL and num_claimed and self._fits_pull(record, num_claimed, first_kept):
            record.num_tokens, record.num_blocks = num_claimed, num_claimed // block_size
            behind = self._pool.window.num_passed((record.pulled_from + record.num_blocks) * block_size)
            # What comes into blocks of a request comes whole, as what it computes itself is, if the source has that.
            num_bare = first_kept // block_size if record.into else max(0, behind - record.pulled_from)
            record.first_window = num_bare if self._pool.windows.num_each else 0

    def settle(self, record: SinkRecord) -> None:
        """Queues a new claim, notes an end, grants what can be granted now. Must be called after every event."""
        if record.machine.state is S.QUEUED:
            if record.kind is not HandoffKind.PROMPT and not record.is_held and record not in self._pulls:
                self._pulls.append(record)
            elif record.kind is HandoffKind.PROMPT and record not in self._queue:
                self._join(record)
        if record.machine.state in ENDED and not record.closed_at:
            record.closed_at = self._ledger.now
        self.grant_in_order()

    def grant_in_order(self) -> None:
        if self._pool.reservations.is_asking:
            return  # what is being given back, by a pull that ends, say, is not for who is in line
        self._grant_given()
        while self._queue:
            record = self._queue[0]
            if record.machine.state is not S.QUEUED:
                self._leave_line()
                continue
            self._ledger.pin(record)
            needed = self._ledger.num_needed(record)
            if not self._may_promise(record, needed):
                break  # what is left is for this node's own prompts, and for pulls, which must have an answer
            if needed > self._pool.num_grantable - self._headroom and not self._make_room(record, needed):
                return
            blocks = self._allocate(record)
            if blocks is None:  # free, but a launched step may still write them
                return
            self._leave_line()
            self._grant(record, blocks)
        self._grant_pulls()

    def _may_promise(self, head: SinkRecord, needed: int) -> bool:
        """Whether room is left beside what others may still write here, and the hits that it goes behind. Nodes that
        compute for each other would else each have promised all of its blocks and none for what they have to compute
        (docs/blocks.md)."""
        if self._most_promised == math.inf:
            return True
        granted = [record for record in self._ledger.live.values() if record.granted]
        held = {block_id for record in (*granted, head) for block_id in (*record.hits, *record.granted)}
        num_windows = sum(len(self._pool.windows.of(block_id)) for block_id in held)
        return not granted or len(held) + num_windows + needed <= self._most_promised

    def _allocate(self, record: SinkRecord) -> list[int] | None:
        num_blocks = record.num_blocks - record.first_block
        return self._pool.allocate_grantable(num_blocks, self._ledger.num_bare(record))

    def _fits_pull(self, record: SinkRecord, num_tokens: int, first_kept: int) -> bool:
        """Whether a claim of so many tokens is as long as what was asked for, and as one before it. Only the beginning
        of a prompt may lack window blocks, before those that are read behind it."""
        num_blocks, rest = divmod(num_tokens, self._ledger.block_size)
        least = len(record.into) or 1
        most_bare = 0 if record.pulled_from else self._pool.window.num_passed(num_tokens) * self._ledger.block_size
        is_as_long = not rest and least <= num_blocks <= record.most_blocks and record.num_claimed in (0, num_tokens)
        return is_as_long and first_kept <= most_bare and not first_kept % self._ledger.block_size

    def age(self) -> None:
        """Lets claims that have waited for too long go before all others, in the order of claims."""
        before = self._ledger.now - AGED_AFTER_S
        aged = [each for each in self._queue if each.queued_at <= before and each.place[0] != FIRST_OF_ALL]
        for record in aged:
            self._queue.remove(record)
            self._take_place(record, FIRST_OF_ALL, record.place[1])

    def _join(self, record: SinkRecord) -> None:
        assert record.request is not None, "a claim waits for what was submitted"
        self._num_claims += 1
        record.queued_at = self._ledger.now
        self._take_place(record, record.request.priority, self._num_claims)

    def _take_place(self, record: SinkRecord, priority: int, number: int) -> None:
        record.place = priority, number
        bisect.insort(self._queue, record, key=_place_of)
        if self._queue[0] is record:
            self._short_since = math.inf

    def _leave_line(self) -> None:
        self._queue.pop(0)
        self._short_since = math.inf

    def _grant_given(self) -> None:
        """Grants what comes into blocks that a request has: it takes none from who is in line, and who is in line may
        wait for that very request's."""
        for record in self._pulls:
            if record.into and record.machine.state is S.QUEUED:
                self._grant(record, record.into)

    def _grant_pulls(self) -> None:
        self._pulls = [record for record in self._pulls if record.machine.state is S.QUEUED]
        for record in self._pulls:
            self._ledger.pin(record)
            needed = self._ledger.num_needed(record)
            can_go_on = self._ledger.may_take(record)
            if not can_go_on or needed > self._pool.num_free - self._headroom:
                record.reason = outcomes.NO_ROOM if can_go_on else outcomes.OTHER_LAYOUT
                record.closed_at = self._ledger.now
                self._actions.run(record, record.machine.on(SinkEvent.DEADLINE))
            elif needed <= self._pool.num_grantable:
                blocks = self._allocate(record)
                assert blocks is not None, "there are as many"
                self._grant(record, blocks)

    def _make_room(self, head: SinkRecord, needed: int) -> bool:
        """Gives the first claim what is held for requests of this node when it has waited for PATIENCE_S, or at once if
        nothing else holds blocks: until then a request that is about to start may do so."""
        make_room, now = self._pool.reservations.make_room, self._ledger.now
        if not self._others_will_free_blocks():
            return make_room(needed, Kind.CLAIM, head)
        self._short_since = min(self._short_since, now)
        if now - self._short_since < PATIENCE_S:
            return False
        self._short_since = now
        has_room = make_room(needed + self._headroom, Kind.CLAIM, head)
        return has_room and needed <= self._pool.num_grantable - self._headroom

    def _others_will_free_blocks(self) -> bool:
        """Whether anything but pinned hits holds blocks: sequences, grants, quarantine. Only then does waiting help,
        and is head-room for growth needed."""
        pinned = {block_id for record in self._ledger.live.values() for block_id in record.hits}
        num_pinned = len(pinned) + sum(len(self._pool.windows.of(block_id)) for block_id in pinned)
        return self._pool.num_blocks - self._pool.num_free > num_pinned

    def _grant(self, record: SinkRecord, blocks: list[int]) -> None:
        # What is computed chunk by chunk has as long as all of it.
        record.lease_until = max(self._ledger.now + self._lease_s, record.deadline if record.into else 0.0)
        self._ledger.grant(record, blocks)
        record.grant = self._keys.sign_grant(
            KVGrant(
                request_id=record.key.request_id,
                attempt=record.key.attempt,
                grant_id=secrets.randbits(63) + 1,
                source_id=record.source_id,
                source_epoch=record.machine.source_epoch,
                sink_id=self._ledger.info.node_id,
                sink_epoch=self._ledger.info.epoch,
                first_block=record.first_block,
                block_ids=self._ledger.granted_ids(record),
                num_prompt_tokens=record.num_tokens,
                lease_s=self._lease_s,
                first_window=record.first_window,
            )
        )
        self._actions.run(record, record.machine.on_can_grant(record.grant.grant_id))
